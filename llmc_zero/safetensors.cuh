/* llmc_zero/safetensors.cuh - the file of a checkpoint: safetensors, with a checksum over every byte. Host only, C++17.

   A file is 8 bytes (the header's length, little endian), the header (JSON, filled up with spaces), the tensors' bytes.
   Python's `safetensors` opens it. The header's __metadata__ holds strings; three of them are this format's own:
     format       "llmc_zero.checkpoint 1"
     pieces       "OFFSET BYTES XXH3;..." of each piece of the data as it was written, in order and without gaps; XXH3
                  is its 64-bit checksum in 16 hex digits, OFFSET counts from the begin of the data
     header_xxh3  the checksum of the 8 bytes and the header, with these 16 digits taken as zeros

       ZeroFileHeader header;                             // describe tensors, strings, pieces (checksums may follow)
       std::string text;
       zero_file_describe(header, &text);                 // text.size() bytes stand before the data
       zero_file_seal(header.pieces, &text);              // puts the checksums in

       zero_file_read_header(fd, &header);                // checks all but the pieces' bytes: sizes, order, header_xxh3
       zero_file_check_piece(fd, header, k, buffer);

   A file is not trusted: whatever its bytes, these functions return, in bounded time and memory, and say what is wrong.
   ZERO_ERROR_FILE: the file is damaged or no checkpoint. ZERO_ERROR_ARGUMENT: it is whole, but of another format version.
   ZERO_ERROR_SYSTEM: the operating system refused.

   It needs two header-only libraries: xxHash (xxhash.h, 0.8 or later) and JSON for Modern C++ (nlohmann/json.hpp); Debian has them as
   libxxhash-dev and nlohmann-json3-dev, and copying the two headers does.

   defines: ZeroFileTensor, ZeroFilePiece, ZeroFileHeader, zero_file_describe, zero_file_seal, zero_file_parse,
            zero_file_read_header, zero_file_check_piece, zero_file_read, zero_file_write, zero_guard, zero_retry
*/
#ifndef LLMC_ZERO_SAFETENSORS_CUH_INCLUDED
#define LLMC_ZERO_SAFETENSORS_CUH_INCLUDED

#include <ctype.h>
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <exception>
#include <map>
#include <set>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>
#ifndef XXH_INLINE_ALL
#define XXH_INLINE_ALL
#endif
#include <xxhash.h>
#if XXH_VERSION_NUMBER < 800
#error "xxHash 0.8 or later is needed: before, XXH3 gave other checksums"
#endif

#include "check.cuh"

#define ZERO_FILE_FORMAT "llmc_zero.checkpoint 1"
#define ZERO_FILE_HEADER_MAX 100000000 /* bytes: what the safetensors package reads */
#ifndef ZERO_FILE_PIECE_BYTES          /* tests cut small files into many */
#define ZERO_FILE_PIECE_BYTES ((size_t)4 << 20)
#endif
#define ZERO_FILE_ALIGN \
    65536 /* the data begins at a multiple of this: a file system's page, or some of them */
#define ZERO_FILE_DIMS_MAX 8
#define ZERO_FILE_NUMBER_MAX \
    ((uint64_t)INT64_MAX) /* of any number: more would be negative where it is counted with signs */

typedef struct ZeroFileTensor {
    std::string name, dtype; /* dtype "F32" or "BF16" */
    std::vector<uint64_t> shape;
    uint64_t begin, end; /* bytes, from the begin of the data */
} ZeroFileTensor;

typedef struct ZeroFilePiece {
    uint64_t offset, bytes, checksum;
} ZeroFilePiece;

typedef struct ZeroFileHeader {
    std::vector<ZeroFileTensor> tensors; /* in order of begin */
    std::vector<ZeroFilePiece> pieces;   /* in order of offset */
    std::map<std::string, std::string> strings;
    uint64_t data_offset; /* bytes before the data; set when read */
    uint64_t data_bytes;
    uint64_t checksum; /* header_xxh3; set when read */
} ZeroFileHeader;

/* Runs work() and turns an exception (host memory is used up, a text is not UTF-8) into a result. */
template <typename Work> static inline ZeroResult zero_guard(Work work) {
    try {
        return work();
    } catch (const std::exception& e) {
        return zero_error(ZERO_ERROR_MEMORY, "%s", e.what());
    }
}

/* Names and values from a file, as they may stand in a message: one line of plain text, not too long. */
static inline std::string zero_file_quote(const std::string& text) {
    std::string quoted = text.substr(0, 48);
    for (char& c : quoted)
        if ((unsigned char)c < ' ' || (unsigned char)c > '~') c = '?';
    return text.size() > 48 ? quoted + "..." : quoted;
}

/* ------------------------------------------------------------------ reading and writing */

/* A call of the system that a signal broke off (-1, EINTR) is made again, but not for ever: fallocate begins anew each time,
   and a timer may be faster. */
template <typename Call> static inline int zero_retry(Call call) {
    int result = call();
    for (int tries = 0; result < 0 && errno == EINTR && tries < 20; tries++) result = call();
    return result;
}

static inline ZeroResult zero_file_read(int fd, void* to, size_t bytes, uint64_t offset) {
    size_t done = 0;
    while (done < bytes) {
        ssize_t n = pread(fd, (char*)to + done, bytes - done, (off_t)(offset + done));
        if (n < 0 && errno == EINTR) continue;
        if (n < 0)
            return zero_error(ZERO_ERROR_SYSTEM, "reading at byte %llu: %s",
                              (unsigned long long)(offset + done), strerror(errno));
        if (n == 0)
            return zero_error(ZERO_ERROR_FILE, "the file ends at byte %llu, before %llu",
                              (unsigned long long)(offset + done), (unsigned long long)(offset + bytes));
        done += (size_t)n;
    }
    return zero_ok();
}

static inline ZeroResult zero_file_write(int fd, const void* from, size_t bytes, uint64_t offset) {
    size_t done = 0;
    while (done < bytes) {
        ssize_t n = pwrite(fd, (const char*)from + done, bytes - done, (off_t)(offset + done));
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0)
            return zero_error(ZERO_ERROR_SYSTEM, "writing %zu bytes at byte %llu: %s", bytes - done,
                              (unsigned long long)(offset + done), strerror(n < 0 ? errno : ENOSPC));
        done += (size_t)n;
    }
    return zero_ok();
}

/* ------------------------------------------------------------------ making a header */

static inline std::string zero_file_hex(uint64_t value) {
    char text[17];
    snprintf(text, sizeof(text), "%016llx", (unsigned long long)value);
    return text;
}

static inline std::string zero_file_pieces_text(const std::vector<ZeroFilePiece>& pieces) {
    std::string text;
    char part[64];
    for (const ZeroFilePiece& piece : pieces) {
        snprintf(part, sizeof(part), "%s%llu %llu %016llx", text.empty() ? "" : ";",
                 (unsigned long long)piece.offset, (unsigned long long)piece.bytes,
                 (unsigned long long)piece.checksum);
        text += part;
    }
    return text;
}

/* A text as JSON. What is not UTF-8 stays so, and the parser refuses it (before it is written: zero_save_plan). */
static inline std::string zero_file_json(const std::string& text) {
    std::string json = "\"";
    char code[8];
    for (char c : text) {
        if (c == '"' || c == '\\') json += '\\';
        if ((unsigned char)c < ' ') snprintf(code, sizeof(code), "\\u%04x", c), json += code;
        if ((unsigned char)c >= ' ') json += c;
    }
    return json + "\"";
}

/* With the comma: a quote inside a JSON string has a backslash before it, so no text can look like these. */
static inline const char* zero_file_pieces_mark() { return ",\"pieces\":\""; }
static inline const char* zero_file_checksum_mark() { return ",\"header_xxh3\":\""; }

/* The bytes before the data, with all checksums 0: their number does not depend on them. Tensors lie in the data as they
   stand in header.tensors. */
static inline ZeroResult zero_file_describe(const ZeroFileHeader& header, std::string* text) {
    std::vector<ZeroFilePiece> blank = header.pieces;
    for (ZeroFilePiece& piece : blank) piece.checksum = 0;
    *text = std::string(8, '\0') + "{\"__metadata__\":{\"format\":" + zero_file_json(ZERO_FILE_FORMAT);
    for (const auto& entry : header.strings)
        *text += "," + zero_file_json(entry.first) + ":" + zero_file_json(entry.second);
    *text += zero_file_checksum_mark() + zero_file_hex(0) + "\"" + zero_file_pieces_mark() +
             zero_file_pieces_text(blank) + "\"}";
    for (const ZeroFileTensor& tensor : header.tensors) {
        *text += "," + zero_file_json(tensor.name) + ":{\"dtype\":" + zero_file_json(tensor.dtype) +
                 ",\"shape\":[";
        for (size_t d = 0; d < tensor.shape.size(); d++)
            *text += (d ? "," : "") + std::to_string(tensor.shape[d]);
        *text +=
            "],\"data_offsets\":[" + std::to_string(tensor.begin) + "," + std::to_string(tensor.end) + "]}";
    }
    *text += "}";
    text->resize((text->size() + ZERO_FILE_ALIGN - 1) / ZERO_FILE_ALIGN * ZERO_FILE_ALIGN, ' ');
    const uint64_t length = text->size() - 8;
    if (length > ZERO_FILE_HEADER_MAX)
        return zero_error(ZERO_ERROR_ARGUMENT, "a header of %llu bytes; at most %d can be read again",
                          (unsigned long long)length, ZERO_FILE_HEADER_MAX);
    for (int i = 0; i < 8; i++) (*text)[(size_t)i] = (char)(length >> (8 * i));
    return zero_ok();
}

/* Where the 16 digits of header_xxh3 stand, or npos unless there is one such place. */
static inline size_t zero_file_find_checksum(const std::string& text) {
    const std::string mark = zero_file_checksum_mark();
    const size_t at = text.find(mark);
    if (at == std::string::npos || text.find(mark, at + 1) != std::string::npos) return std::string::npos;
    return at + mark.size() + 16 <= text.size() ? at + mark.size() : std::string::npos;
}

/* The checksum of a text in which these 16 digits count as zeros. */
static inline uint64_t zero_file_checksum(const std::string& text, size_t digits) {
    XXH3_state_t state;
    XXH3_64bits_reset(&state);
    XXH3_64bits_update(&state, text.data(), digits);
    XXH3_64bits_update(&state, "0000000000000000", 16);
    XXH3_64bits_update(&state, text.data() + digits + 16, text.size() - digits - 16);
    return XXH3_64bits_digest(&state);
}

/* Puts the pieces' checksums and the header's own into a text of zero_file_describe; again, when they have changed. */
static inline ZeroResult zero_file_seal(const std::vector<ZeroFilePiece>& pieces, std::string* text) {
    const std::string sealed = zero_file_pieces_text(pieces), mark = zero_file_pieces_mark();
    const size_t at = text->find(mark), digits = zero_file_find_checksum(*text);
    if (at == std::string::npos || digits == std::string::npos)
        return zero_error(ZERO_ERROR_ARGUMENT, "a string of the caller has a name that the header needs");
    text->replace(at + mark.size(), sealed.size(), sealed);
    text->replace(digits, 16, zero_file_hex(zero_file_checksum(*text, digits)));
    return zero_ok();
}

/* ------------------------------------------------------------------ reading a header */

/* What nlohmann's parser tells while it reads: only the shapes that a header may have are taken. A tensor is
   {"dtype": text, "shape": [whole numbers], "data_offsets": [whole number, whole number]}, each once. */
typedef struct ZeroFileSax {
    ZeroFileHeader* header;
    std::set<std::string> names;
    ZeroFileTensor tensor;
    std::vector<uint64_t> offsets;
    std::string field, error;
    int depth, in_metadata, fields_seen;
    std::vector<uint64_t>* array; /* being filled, or NULL */

    bool fail(const std::string& what) {
        if (error.empty()) error = what;
        return false;
    }
    bool null() { return fail("null"); }
    bool boolean(bool) { return fail("true or false"); }
    bool number_integer(int64_t value) { return fail("the negative number " + std::to_string(value)); }
    bool number_float(double, const std::string& text) {
        return fail("the number " + zero_file_quote(text) + ", which is no whole number of 64 bits");
    }
    template <typename Binary> bool binary(Binary&) { return fail("binary data"); }
    bool number_unsigned(uint64_t value) {
        if (!array) return fail("the number " + std::to_string(value) + " in a wrong place");
        if (array->size() >= ZERO_FILE_DIMS_MAX) return fail("a list of more than 8 numbers");
        if (value > ZERO_FILE_NUMBER_MAX)
            return fail("the number " + std::to_string(value) + ", above 2^63 - 1");
        array->push_back(value);
        return true;
    }
    bool string(std::string& value) {
        if (depth != 2 || array) return fail("the text " + zero_file_quote(value) + " in a wrong place");
        if (in_metadata) {
            header->strings[field] = std::move(value);
            return true;
        }
        if (field != "dtype") return fail("a text as " + zero_file_quote(field));
        tensor.dtype = std::move(value);
        fields_seen |= 1;
        return true;
    }
    bool start_object(std::size_t) {
        if (depth >= 2 || array) return fail("an object nested too deep");
        depth++;
        fields_seen = 0;
        return true;
    }
    bool key(std::string& name) {
        if (depth == 1) {
            if (!names.insert(name).second) return fail("the name " + zero_file_quote(name) + " twice");
            in_metadata = name == "__metadata__";
            tensor.name = std::move(name);
            tensor.shape.clear();
            offsets.clear();
        } else {
            const int bit = name == "dtype" ? 1 : name == "shape" ? 2 : name == "data_offsets" ? 4 : 0;
            if (in_metadata ? header->strings.count(name) != 0 : (fields_seen & bit) != 0)
                return fail("the name " + zero_file_quote(name) + " twice");
            if (!in_metadata && bit == 0) return fail("a field named " + zero_file_quote(name));
            field = std::move(name);
        }
        return true;
    }
    bool start_array(std::size_t) {
        if (depth != 2 || in_metadata || array || (field != "shape" && field != "data_offsets"))
            return fail("a list in a wrong place");
        fields_seen |= field == "shape" ? 2 : 4;
        array = field == "shape" ? &tensor.shape : &offsets;
        return true;
    }
    bool end_array() {
        array = NULL;
        return true;
    }
    bool end_object() {
        depth--;
        if (depth == 0 || in_metadata) return true;
        if (fields_seen != 7 || offsets.size() != 2)
            return fail("tensor " + zero_file_quote(tensor.name) +
                        " without dtype, shape or two data_offsets");
        tensor.begin = offsets[0], tensor.end = offsets[1];
        header->tensors.push_back(tensor);
        return true;
    }
    bool parse_error(std::size_t position, const std::string&, const std::exception&) {
        return fail("no JSON at byte " + std::to_string(position));
    }
} ZeroFileSax;

static inline bool zero_file_before(const ZeroFileTensor& a, const ZeroFileTensor& b) {
    return a.begin != b.begin ? a.begin < b.begin : a.end < b.end;
}

/* Tensors must cover the data without gaps or overlaps, each as long as its shape says. */
static inline ZeroResult zero_file_check_tensors(ZeroFileHeader* header) {
    uint64_t next = 0;
    std::stable_sort(header->tensors.begin(), header->tensors.end(), zero_file_before);
    for (const ZeroFileTensor& tensor : header->tensors) {
        const std::string name = zero_file_quote(tensor.name);
        const uint64_t element_bytes = tensor.dtype == "F32" ? 4 : tensor.dtype == "BF16" ? 2 : 0;
        uint64_t bytes = element_bytes;
        if (element_bytes == 0)
            return zero_error(ZERO_ERROR_FILE, "tensor %s has dtype %s; F32 and BF16 are known", name.c_str(),
                              zero_file_quote(tensor.dtype).c_str());
        for (uint64_t dim : tensor.shape)
            if (dim != 0 && bytes > ZERO_FILE_NUMBER_MAX / dim)
                return zero_error(ZERO_ERROR_FILE, "tensor %s has more than 2^63 - 1 bytes", name.c_str());
            else
                bytes *= dim;
        if (tensor.begin != next || tensor.end < tensor.begin || tensor.end - tensor.begin != bytes)
            return zero_error(ZERO_ERROR_FILE,
                              "tensor %s of %llu bytes lies at %llu to %llu; the one before it ends at %llu",
                              name.c_str(), (unsigned long long)bytes, (unsigned long long)tensor.begin,
                              (unsigned long long)tensor.end, (unsigned long long)next);
        next = tensor.end;
    }
    if (next != header->data_bytes)
        return zero_error(ZERO_ERROR_FILE, "the tensors have %llu bytes, but %llu bytes follow the header",
                          (unsigned long long)next, (unsigned long long)header->data_bytes);
    return zero_ok();
}

/* A whole number at *at, up to the character `end`, which is passed over. 0: there is none. */
static inline int zero_file_number(const char** at, char end, int base, uint64_t* value) {
    char* behind;
    if (!isxdigit((unsigned char)**at)) return 0;
    errno = 0;
    *value = strtoull(*at, &behind, base);
    if (errno != 0 || *behind != end) return 0;
    *at = end ? behind + 1 : behind;
    return 1;
}

/* The pieces must cover the data in order, each of 1 byte to 4 MB. */
static inline ZeroResult zero_file_parse_pieces(ZeroFileHeader* header) {
    const std::string& text = header->strings["pieces"];
    const char* at = text.c_str();
    uint64_t next = 0;
    while (*at) {
        ZeroFilePiece piece;
        char end = strchr(at, ';') ? ';' : '\0';
        if (!zero_file_number(&at, ' ', 10, &piece.offset) || !zero_file_number(&at, ' ', 10, &piece.bytes) ||
            !zero_file_number(&at, end, 16, &piece.checksum))
            return zero_error(ZERO_ERROR_FILE, "the list of pieces is damaged at its byte %zu",
                              (size_t)(at - text.c_str()));
        if (piece.offset != next || piece.bytes == 0 || piece.bytes > ZERO_FILE_PIECE_BYTES)
            return zero_error(ZERO_ERROR_FILE,
                              "a piece of %llu bytes at %llu, where one of 1 to %zu bytes at %llu "
                              "must follow",
                              (unsigned long long)piece.bytes, (unsigned long long)piece.offset,
                              ZERO_FILE_PIECE_BYTES, (unsigned long long)next);
        next += piece.bytes;
        header->pieces.push_back(piece);
    }
    if (next != header->data_bytes || at != text.c_str() + text.size())
        return zero_error(ZERO_ERROR_FILE, "the pieces cover %llu of %llu bytes", (unsigned long long)next,
                          (unsigned long long)header->data_bytes);
    return zero_ok();
}

/* text: the 8 bytes and the header, as they stand in the file. */
static inline ZeroResult zero_file_parse(const std::string& text, uint64_t file_bytes,
                                         ZeroFileHeader* header) {
    const size_t digits = zero_file_find_checksum(text);
    *header = ZeroFileHeader();
    ZeroFileSax sax = {header, {}, {}, {}, "", "", 0, 0, 0, NULL};
    header->data_offset = text.size();
    header->data_bytes = file_bytes - text.size();
    if (digits == std::string::npos)
        return zero_error(ZERO_ERROR_FILE,
                          "not written by llmc_zero, or damaged: no header_xxh3 in its header");
    header->checksum = zero_file_checksum(text, digits);
    if (text.compare(digits, 16, zero_file_hex(header->checksum)) != 0)
        return zero_error(ZERO_ERROR_FILE, "its header is damaged: checksum %s, %s is written in it",
                          zero_file_hex(header->checksum).c_str(),
                          zero_file_quote(text.substr(digits, 16)).c_str());
    if (!nlohmann::json::sax_parse(text.begin() + 8, text.end(), &sax))
        return zero_error(ZERO_ERROR_FILE, "its header holds %s", sax.error.c_str());
    if (header->strings["format"] !=
        ZERO_FILE_FORMAT) /* whole, but of another version: not one to pass over */
        return zero_error(ZERO_ERROR_ARGUMENT, "its format is \"%s\", this program reads \"%s\"",
                          zero_file_quote(header->strings["format"]).c_str(), ZERO_FILE_FORMAT);
    ZERO_TRY(zero_file_check_tensors(header));
    ZERO_TRY(zero_file_parse_pieces(header));
    header->strings.erase("pieces"); /* long, and said by header->pieces */
    return zero_ok();
}

/* Reads and checks everything but the bytes of the pieces. */
static inline ZeroResult zero_file_read_header(int fd, ZeroFileHeader* header) {
    struct stat status;
    unsigned char raw[8];
    uint64_t length = 0;
    std::string text;
    if (fstat(fd, &status) != 0) return zero_error(ZERO_ERROR_SYSTEM, "fstat: %s", strerror(errno));
    if (!S_ISREG(status.st_mode)) return zero_error(ZERO_ERROR_FILE, "it is no regular file");
    const uint64_t file_bytes = (uint64_t)status.st_size;
    ZERO_TRY(zero_file_read(fd, raw, sizeof(raw), 0));
    for (int i = 0; i < 8; i++) length |= (uint64_t)raw[i] << (8 * i);
    if (length > ZERO_FILE_HEADER_MAX || length > file_bytes - 8)
        return zero_error(ZERO_ERROR_FILE, "its header claims %llu bytes; the file has %llu, %d are allowed",
                          (unsigned long long)length, (unsigned long long)file_bytes, ZERO_FILE_HEADER_MAX);
    return zero_guard([&]() {
        text.resize((size_t)length + 8);
        ZERO_TRY(zero_file_read(fd, &text[0], text.size(), 0));
        return zero_file_parse(text, file_bytes, header);
    });
}

/* Reads piece k into buffer (ZERO_FILE_PIECE_BYTES of room) and compares its checksum. */
static inline ZeroResult zero_file_check_piece(int fd, const ZeroFileHeader& header, size_t k, void* buffer) {
    const ZeroFilePiece& piece = header.pieces[k];
    ZERO_TRY(zero_file_read(fd, buffer, (size_t)piece.bytes, header.data_offset + piece.offset));
    const uint64_t found = XXH3_64bits(buffer, (size_t)piece.bytes);
    if (found == piece.checksum) return zero_ok();
    return zero_error(ZERO_ERROR_FILE,
                      "bytes %llu to %llu are damaged: checksum %s, %s is written in its header",
                      (unsigned long long)(header.data_offset + piece.offset),
                      (unsigned long long)(header.data_offset + piece.offset + piece.bytes),
                      zero_file_hex(found).c_str(), zero_file_hex(piece.checksum).c_str());
}

#endif /* LLMC_ZERO_SAFETENSORS_CUH_INCLUDED */
