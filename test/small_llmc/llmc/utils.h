// Files and memory that end the program when they fail.
#pragma once
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <dirent.h>

inline void must(bool good, const char* what, const char* name) {
    if (good) return;
    fprintf(stderr, "small_llmc: cannot %s %s\n", what, name);
    exit(EXIT_FAILURE);
}
inline FILE* fopenCheck(const char* name, const char* how) {
    FILE* opened = fopen(name, how);
    must(opened != NULL, "open", name);
    return opened;
}
inline void freadCheck(void* to, size_t size, size_t n, FILE* f) {
    must(fread(to, size, n, f) == n, "read", "a file"); }
inline void fwriteCheck(const void* p, size_t size, size_t n, FILE* f) {
    must(fwrite(p, size, n, f) == n, "write", "a file"); }
inline void* mallocCheck(size_t bytes) {
    void* got = malloc(bytes);
    must(got != NULL, "allocate", "host memory");
    return got;
}
inline unsigned random_u32(unsigned long long* state) {
    *state = *state * 6364136223846793005ull + 1442695040888963407ull;
    return (unsigned)(*state >> 32);
}
inline int find_max_step(const char* folder) {
    int most = -1;
    DIR* all = folder ? opendir(folder) : NULL;
    for (struct dirent* one; all && (one = readdir(all)) != NULL;)
        if (!strncmp(one->d_name, "DONE_", 5) && atoi(one->d_name + 5) > most) most = atoi(one->d_name + 5);
    if (all) closedir(all);
    return most;
}
