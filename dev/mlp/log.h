/* dev/mlp/log.h - main.log as a resumed run finds it, and folders that are still there after a crash.

   A line is "s:STEP trl:LOSS lr:RATE norm:NORM", steps from 1 on. What a resumed run keeps: the line of each step up to its
   checkpoint's, the last one where a step has several. As a rule that is how the file begins, and the file is cut there, in
   place: mode, owner, names and links stay, and a run that is killed leaves it cut or not. Where something in the middle goes,
   the lines are written to a new file, which takes the place of the old one with its mode and group, where a link leads to; a
   run that is killed leaves one or the other. What the log lacks or had too much is said, a warning each.

   defines: folder_sync, log_cut
*/
#pragma once
#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

#include "../../llmc_zero/checkpoint_folder.cuh"

/* What was made or renamed in a folder is there after a crash. Some file systems have no such thing (EINVAL), and a folder
   that may be written, not read, cannot be opened (EACCES): no errors. -1: errno says why. */
static inline int folder_sync(const char* folder) {
    const int fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int failed = fd < 0 ? errno != EACCES : fsync(fd) != 0 && errno != EINVAL;
    const int error = errno;
    if (fd >= 0) close(fd);
    errno = error;
    return failed ? -1 : 0;
}

/* The folder that a path's last name stands in. */
static inline int folder_sync_above(const char* path) { return folder_sync(zero_folder_of(path).c_str()); }

typedef struct LogLine {
    long long step;
    off_t begin;
    size_t bytes;
    double loss, norm;
} LogLine;

typedef struct LogLines {
    std::vector<LogLine> lines; /* once they are sorted: by step, one each */
    long long foreign, first_foreign;
    long long doubled, first_doubled;
    long long missing, first_missing; /* before the last line */
} LogLines;

/* 0: the line is none of ours, a NUL in it or its end cut off. */
static inline int log_parse(const char* text, size_t bytes, LogLine* line) {
    char loss[48], rate[48], norm[48];
    double any;
    int end = 0;
    return strlen(text) == bytes &&
           sscanf(text, "s:%lld trl:%47[^ \n] lr:%47[^ \n] norm:%47[^ \n]%n", &line->step, loss, rate, norm,
                  &end) == 4 &&
           strcmp(text + end, "\n") == 0 && line->step > 0 && zero_number_value(loss, &line->loss) &&
           zero_number_value(rate, &any) && zero_number_value(norm, &line->norm);
}

/* Reads the lines up to a step. A last line that broke off is as if it were not there. */
static inline ZeroResult log_read(FILE* file, long long step, LogLines* log) {
    return zero_guard([&]() {
        char* text = NULL;
        size_t capacity = 0;
        ssize_t bytes;
        off_t begin = 0;
        for (long long number = 1; (bytes = getline(&text, &capacity, file)) > 0; number++) {
            LogLine line = {0, begin, (size_t)bytes, 0.0, 0.0};
            const int ours = log_parse(text, line.bytes, &line);
            if (!ours && text[bytes - 1] == '\n' && log->foreign++ == 0) log->first_foreign = number;
            if (ours && line.step <= step) log->lines.push_back(line);
            begin += bytes;
        }
        free(text);
        return ferror(file) ? zero_error(ZERO_ERROR_SYSTEM, "reading it: %s", strerror(errno)) : zero_ok();
    });
}

/* By step, the last line of each; counts what is doubled or missing. */
static inline void log_sort(LogLines* log) {
    size_t kept = 0;
    std::sort(log->lines.begin(), log->lines.end(), [](const LogLine& a, const LogLine& b) {
        return a.step != b.step ? a.step < b.step : a.begin < b.begin;
    });
    long long before = 0, counted = 0;
    for (const LogLine& line : log->lines) {
        if (line.step == before) {
            if (counted != before && log->doubled++ == 0) log->first_doubled = before;
            counted = before; /* a step counts once, however many lines it has */
            log->lines[kept - 1] = line;
            continue;
        }
        if (line.step > before + 1 && log->missing == 0) log->first_missing = before + 1;
        log->missing += line.step - before - 1;
        before = line.step;
        log->lines[kept++] = line;
    }
    log->lines.resize(kept);
}

static inline void log_warn(const LogLines* log, const char* path, long long step) {
    const long long last = log->lines.empty() ? 0 : log->lines.back().step;
    if (log->foreign)
        printf("warning: %s: left out: %lld line(s) that are none of a run, the first is line %lld\n", path,
               log->foreign, log->first_foreign);
    if (log->doubled)
        printf(
            "warning: %s: %lld step(s) have several lines, the first is step %lld: the last of each stays\n",
            path, log->doubled, log->first_doubled);
    if (log->missing)
        printf("warning: %s: the lines of %lld step(s) before step %lld are lost, the first is step %lld\n",
               path, log->missing, last, log->first_missing);
    if (last < step)
        printf("warning: %s ends at step %lld: the lines up to step %lld are lost\n", path, last, step);
}

/* The lines follow one another from the begin of the file on: *end is where the last one ends. */
static inline int log_is_prefix(const LogLines* log, off_t* end) {
    *end = 0;
    for (const LogLine& line : log->lines) {
        if (line.begin != *end) return 0;
        *end += (off_t)line.bytes;
    }
    return 1;
}

/* Copies the lines to a new file with the mode, the owner and the group of the old one, as far as this user may. */
static inline int log_copy(const LogLines* log, int from, const char* path) {
    std::vector<char> text;
    struct stat old;
    off_t end = 0;
    if (fstat(from, &old) != 0 || (unlink(path) != 0 && errno != ENOENT)) return -1;
    const int to = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (to < 0) return -1;
    ZeroResult result = zero_ok();
    for (size_t i = 0; i < log->lines.size() && result.code == ZERO_OK; i++) {
        const LogLine& line = log->lines[i];
        text.resize(line.bytes);
        result = zero_file_read(from, text.data(), line.bytes, (uint64_t)line.begin);
        if (result.code == ZERO_OK) result = zero_file_write(to, text.data(), line.bytes, (uint64_t)end);
        end += (off_t)line.bytes;
    }
    if (fchown(to, old.st_uid, old.st_gid) != 0 && fchown(to, (uid_t)-1, old.st_gid) != 0)
        printf("warning: %s: its group could not be kept: %s\n", path, strerror(errno));
    int failed = result.code != ZERO_OK || fchmod(to, old.st_mode & 07777) != 0 || fsync(to) != 0;
    failed |= close(to) != 0;
    return failed ? -1 : 0;
}

/* In place of the file that `path` leads to. */
static inline int log_replace(const LogLines* log, int from, const char* path) {
    char temporary[4200], *real = realpath(path, NULL);
    struct stat old;
    if (!real) return -1;
    snprintf(temporary, sizeof(temporary), "%s.tmp", real);
    if (fstat(from, &old) == 0 && old.st_nlink > 1)
        printf("warning: %s: the file has %llu names (hard links); the others stay as they are\n", path,
               (unsigned long long)old.st_nlink);
    const int failed =
        log_copy(log, from, temporary) != 0 || rename(temporary, real) != 0 || folder_sync_above(real) != 0;
    free(real);
    return failed ? -1 : 0;
}

/* Cuts a log back to a step, as said above; loss and norm: of its last line, if there is one. A log that is not there is
   said, and no error. -1: errno says why. */
static inline int log_cut(const char* path, long long step, double* loss, double* norm) {
    LogLines log = LogLines();
    off_t end;
    FILE* file = fopen(path, "r+");
    if (!file && errno != ENOENT) return -1;
    if (!file) {
        printf("warning: %s is missing: the lines of steps 1 to %lld are lost\n", path, step);
        return 0;
    }
    int failed = log_read(file, step, &log).code != ZERO_OK;
    if (!failed) {
        log_sort(&log);
        log_warn(&log, path, step);
        failed = log_is_prefix(&log, &end) ? ftruncate(fileno(file), end) != 0 || fsync(fileno(file)) != 0
                                           : log_replace(&log, fileno(file), path) != 0;
    }
    if (!failed && !log.lines.empty()) *loss = log.lines.back().loss, *norm = log.lines.back().norm;
    const int error = errno;
    fclose(file);
    errno = error;
    return failed ? -1 : 0;
}
