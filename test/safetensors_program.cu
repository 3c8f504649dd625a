/* test/safetensors_program.cu - what the reader of checkpoint files does with bytes that nobody wrote. Host only:

       build/test/safetensors_program FILE

   FILE is a small good checkpoint. Every byte of its header and 1,000 others are flipped, it is cut at every length below
   4 KB and near its end, bytes are appended; then come headers made to do harm, with a right checksum. Each must be refused
   in words. Prints how many were; exit code 1 if one was taken for good. */
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "../llmc_zero/safetensors.cuh"

static int refused = 0, accepted = 0;

/* Reads a file of these bytes as a load does. */
static ZeroResult read_all(const std::string& bytes) {
    static char buffer[ZERO_FILE_PIECE_BYTES];
    static int fd = memfd_create("checkpoint", 0);
    ZeroFileHeader header;
    if (ftruncate(fd, 0) != 0) return zero_error(ZERO_ERROR_SYSTEM, "ftruncate: %s", strerror(errno));
    ZERO_TRY(zero_file_write(fd, bytes.data(), bytes.size(), 0));
    ZERO_TRY(zero_file_read_header(fd, &header));
    for (size_t k = 0; k < header.pieces.size(); k++) ZERO_TRY(zero_file_check_piece(fd, header, k, buffer));
    return zero_ok();
}

static void must_refuse(const std::string& bytes, const std::string& what) {
    const ZeroResult result = read_all(bytes);
    const bool in_words =
        (result.code == ZERO_ERROR_FILE || what.find("\"format\":\"other\"") != std::string::npos) &&
        strlen(result.text) > 10 && !strchr(result.text, '\n');
    refused += in_words;
    accepted += !in_words;
    if (!in_words) printf("%s: code %d: %s\n", what.c_str(), (int)result.code, result.text);
}

static void flip(std::string* bytes, size_t at, int with) {
    (*bytes)[at] = (char)((*bytes)[at] ^ with);
    must_refuse(*bytes, "byte " + std::to_string(at) + " with " + std::to_string(with));
    (*bytes)[at] = (char)((*bytes)[at] ^ with);
}

/* A file of this header and these data bytes, with its checksum in the place of 16 zeros. */
static std::string sealed(const std::string& json, const std::string& data) {
    std::string text(8, '\0');
    text += json;
    for (int i = 0; i < 8; i++) text[(size_t)i] = (char)((uint64_t)json.size() >> (8 * i));
    const size_t digits = zero_file_find_checksum(text);
    if (digits != std::string::npos)
        text.replace(digits, 16, zero_file_hex(zero_file_checksum(text, digits)));
    return text + data;
}

static std::string metadata(const std::string& pieces) {
    return "\"__metadata__\":{\"format\":\"" ZERO_FILE_FORMAT
           "\",\"header_xxh3\":\"0000000000000000\",\"pieces\":\"" +
           pieces + "\"}";
}

static std::string tensor(const char* name, const std::string& shape, const std::string& offsets,
                          const char* dtype = "F32") {
    return std::string("\"") + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":[" + shape +
           "],\"data_offsets\":[" + offsets + "]}";
}

static void hostile() {
    const std::string data(16, 'x'), piece = "0 16 " + zero_file_hex(XXH3_64bits(data.data(), 16));
    const std::string good = "{" + metadata(piece) + "," + tensor("w", "4", "0,16") + "}";
    const ZeroResult result = read_all(sealed(good, data));
    if (result.code != ZERO_OK) printf("the good one: %s\n", result.text);
    accepted += result.code != ZERO_OK;
    const std::string m = "{" + metadata(piece) + ",";
    const std::string half = zero_file_hex(XXH3_64bits(data.data(), 8));
    const std::string long_data(ZERO_FILE_PIECE_BYTES + 4, 'x'),
        long_bytes = std::to_string(long_data.size());
    must_refuse(sealed("{" +
                           metadata("0 " + long_bytes + " " +
                                    zero_file_hex(XXH3_64bits(long_data.data(), long_data.size()))) +
                           "," + tensor("w", std::to_string(long_data.size() / 4), "0," + long_bytes) + "}",
                       long_data),
                "a piece that is too long");
    const std::string deep(100000, '['), objects = std::string(50000, '{');
    const std::string headers[] = {
        "",
        "{}",
        "null",
        "[]",
        "{" + metadata(piece) + "}",
        m + tensor("w", "4", "0,16") + "} x",
        m + tensor("w", "4", "-4,12") + "}",
        m + tensor("w", "-4", "0,16") + "}",
        m + tensor("w", "4.0", "0,16") + "}",
        m + tensor("w", "4", "0,16.5") + "}",
        m + tensor("w", "4", "0,1e1") + "}",
        m + tensor("w", "4", "16,0") + "}",
        m + tensor("w", "4", "0,18446744073709551616") + "}",
        m + tensor("w", "4", "0,18446744073709551615") + "}",
        m + tensor("w", "4", "0") + "}",
        m + tensor("w", "4", "0,8,16") + "}",
        m + tensor("w", "4294967296,4294967296", "0,16") + "}",
        m + tensor("w", "4611686018427387905", "0,4") + "}",
        m + tensor("w", "4611686018427387908", "0,16") + "}",
        m + tensor("w", "3", "0,16") + "}",
        "{" + metadata("0 8 " + half + ";0 8 " + half) + "," + tensor("w", "4", "0,16") + "}",
        m + tensor("e", "0", "0,0", "F64") + "," + tensor("w", "4", "0,16") + "}",
        m + tensor("w", "2,2,1,1,1,1,1,1,1", "0,16") + "}",
        m + tensor("w", "[4]", "0,16") + "}",
        m + tensor("w", "5", "0,20") + "}",
        m + tensor("w", "3", "0,12") + "}",
        m + tensor("w", "4", "0,16", "F64") + "}",
        m + tensor("w", "4", "0,16", "") + "}",
        m + tensor("w", "2", "0,8") + "," + tensor("w", "2", "8,16") + "}",
        m + tensor("a", "2", "0,8") + "," + tensor("b", "3", "4,16") + "}",
        m + tensor("a", "1", "0,4") + "," + tensor("b", "2", "8,16") + "}",
        m + tensor("a", "4", "0,16") + "," + tensor("b", "4", "0,16") + "}",
        m + tensor("w", "4", "0,16") + "," + metadata(piece) + "}",
        m + "\"w\":5}",
        m + "\"w\":\"text\"}",
        m + "\"w\":[1]}",
        m + "\"w\":null}",
        m + "\"w\":true}",
        m + "\"w\":{}}",
        m + "\"w\":{\"dtype\":5,\"shape\":[4],\"data_offsets\":[0,16]}}",
        m + "\"w\":{\"dtype\":\"F32\",\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[0,16]}}",
        m + "\"w\":{\"dtype\":\"F32\",\"shape\":{},\"data_offsets\":[0,16]}}",
        m + "\"w\":{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[0,16],\"more\":1}}",
        m + "\"w\":{\"dtype\":\"F32\",\"shape\":[\"4\"],\"data_offsets\":[0,16]}}",
        m + "\"w\xff\xfe\":{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[0,16]}}",
        m + "\"w\":" + deep,
        m + "\"w\":" + objects,
        deep + "\"header_xxh3\":\"0000000000000000\"",
        "{" + metadata("") + "," + tensor("w", "4", "0,16") + "}",
        "{" + metadata("0 15 " + piece.substr(5)) + "," + tensor("w", "4", "0,16") + "}",
        "{" + metadata("1 15 " + piece.substr(5)) + "," + tensor("w", "4", "0,16") + "}",
        "{" + metadata("0 17 " + piece.substr(5)) + "," + tensor("w", "4", "0,16") + "}",
        "{" + metadata("0 99999999999999999999 " + piece.substr(5)) + "," + tensor("w", "4", "0,16") + "}",
        "{" + metadata("-0 16 " + piece.substr(5)) + "," + tensor("w", "4", "0,16") + "}",
        "{" + metadata("0 16") + "," + tensor("w", "4", "0,16") + "}",
        "{" + metadata("0 16 xyz") + "," + tensor("w", "4", "0,16") + "}",
        "{" + metadata(piece + ";" + piece) + "," + tensor("w", "4", "0,16") + "}",
        "{" + metadata("0 0 2d06800538d394c2;" + piece) + "," + tensor("w", "4", "0,16") + "}",
        "{" + metadata(piece + "\\u0000;16 4 0") + "," + tensor("w", "4", "0,16") + "}",
        "{\"__metadata__\":{\"a\":\"\\\"header_xxh3\\\":\\\"0000000000000000\\\"\"}," +
            tensor("w", "4", "0,16") + "}",
        "{\"__metadata__\":{\"format\":\"other\",\"header_xxh3\":\"0000000000000000\",\"pieces\":\"" + piece +
            "\"}," + tensor("w", "4", "0,16") + "}",
        "{\"__metadata__\":{\"format\":1,\"header_xxh3\":\"0000000000000000\"}," + tensor("w", "4", "0,16") +
            "}",
        "{\"__metadata__\":{\"a\":\"\",\"a\":\"\",\"header_xxh3\":\"0000000000000000\"}," +
            tensor("w", "4", "0,16") + "}",
        "{\"__metadata__\":[\"header_xxh3\":\"0000000000000000\"]}",
    };
    for (const std::string& json : headers) must_refuse(sealed(json, data), json.substr(0, 300));
    for (uint64_t length :
         {(uint64_t)0, (uint64_t)1, UINT64_MAX, UINT64_MAX - 7, (uint64_t)INT64_MAX, (uint64_t)1 << 40,
          (uint64_t)ZERO_FILE_HEADER_MAX + 1, (uint64_t)good.size() + 17}) {
        std::string file = sealed(good, data);
        memcpy(&file[0], &length, 8);
        must_refuse(file, "length " + std::to_string(length));
    }
}

int main(int argc, char** argv) {
    std::string bytes;
    FILE* file = argc == 2 ? fopen(argv[1], "rb") : NULL;
    char buffer[65536];
    uint64_t header_length = 0, random = 1;
    if (!file) return fprintf(stderr, "usage: safetensors_program FILE\n"), 2;
    for (size_t n; (n = fread(buffer, 1, sizeof(buffer), file)) > 0;) bytes.append(buffer, n);
    fclose(file);
    if (read_all(bytes).code != ZERO_OK) return printf("the file itself: %s\n", read_all(bytes).text), 1;
    memcpy(&header_length, bytes.data(), 8);
    const size_t header = (size_t)header_length + 8;
    for (size_t at = 0; at < header; at++) flip(&bytes, at, 1 << at % 8);
    for (size_t at = 0; at < header; at += 3) flip(&bytes, at, 0x20);
    for (int i = 0; i < 1000; i++) {
        random = random * 6364136223846793005ull + 1442695040888963407ull;
        flip(&bytes, header + (size_t)(random >> 20) % (bytes.size() - header), 1 << (random >> 60) % 8);
    }
    for (size_t length = 0; length < bytes.size(); length += length < 4096 ? 1 : 97)
        must_refuse(bytes.substr(0, length), "cut at " + std::to_string(length));
    must_refuse(bytes.substr(0, bytes.size() - 1), "one byte less");
    must_refuse(bytes + '\0', "one byte more");
    must_refuse(bytes + bytes, "twice");
    hostile();
    printf("%d refused, %d not\n", refused, accepted);
    return accepted != 0;
}
