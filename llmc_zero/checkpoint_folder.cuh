/* llmc_zero/checkpoint_folder.cuh - a folder of checkpoints: their names, the newest that is whole, the last k.

       char path[4096];
       zero_checkpoint_path(path, sizeof(path), "run", step);               // run/step_00000010.safetensors
       zero_checkpoint_save(&z, path, &what);
       if (rank == 0) zero_checkpoint_rotate("run", 3, step);               // keep the last 3
       ...
       std::vector<std::string> passed_over;
       int found;
       zero_checkpoint_resume(&z, "run", &what, NULL, &passed_over, &found);   // all ranks

   A file that is damaged is passed over, with a line that says why, and once an older one is loaded it is renamed to
   NAME.damaged: it must not count among the last k. A file that is whole but belongs to another model, optimizer or seed,
   or whose name is not its step's, is an error, not passed over.

   defines: zero_checkpoint_path, zero_checkpoint_steps, zero_checkpoint_rotate, zero_checkpoint_resume
*/
#ifndef LLMC_ZERO_CHECKPOINT_FOLDER_CUH_INCLUDED
#define LLMC_ZERO_CHECKPOINT_FOLDER_CUH_INCLUDED

#include <dirent.h>

#include "checkpoint.cuh"

static inline ZeroResult zero_checkpoint_path(char* path, size_t bytes, const char* folder, uint64_t step) {
    int length = snprintf(path, bytes, "%s/step_%08llu.safetensors", folder, (unsigned long long)step);
    if (length > 0 && (size_t)length < bytes) return zero_ok();
    return zero_error(ZERO_ERROR_ARGUMENT, "the path of folder %.60s is too long", folder);
}

/* The step in a file's name, and whether the name is a checkpoint's (1), the temporary one of a save (2) or neither (0).
   Names that zero_checkpoint_path would write otherwise are neither. */
static inline int zero_checkpoint_name(const char* name, uint64_t* step) {
    char again[64];
    const char* at = name + 5;
    if (strncmp(name, "step_", 5) != 0 || !zero_file_number(&at, '.', 10, step)) return 0;
    snprintf(again, sizeof(again), "step_%08llu.safetensors", (unsigned long long)*step);
    if (strcmp(name, again) == 0) return 1;
    return strncmp(name, again, strlen(again)) == 0 && strcmp(name + strlen(again), ".tmp") == 0 ? 2 : 0;
}

/* The steps of the checkpoints in a folder, ascending, and the names of temporary files. A folder that is not there holds
   none. */
static inline ZeroResult zero_checkpoint_steps(const char* folder, std::vector<uint64_t>* steps,
                                               std::vector<std::string>* temporary) {
    DIR* directory = opendir(folder);
    if (!directory && errno == ENOENT) return zero_ok();
    if (!directory) return zero_error(ZERO_ERROR_SYSTEM, "reading folder %.80s: %s", folder, strerror(errno));
    ZeroResult result = zero_guard([&]() {
        errno = 0;
        for (struct dirent* entry; (entry = readdir(directory)) != NULL; errno = 0) {
            uint64_t step;
            const int kind = zero_checkpoint_name(entry->d_name, &step);
            if (kind == 1) steps->push_back(step);
            if (kind == 2) temporary->push_back(entry->d_name);
        }
        std::sort(steps->begin(), steps->end());
        return errno ? zero_error(ZERO_ERROR_SYSTEM, "reading folder %.80s: %s", folder, strerror(errno))
                     : zero_ok();
    });
    closedir(directory);
    return result;
}

/* After a save that succeeded, on one rank: deletes all checkpoints up to `newest`, the step just saved, but the last
   `keep` (0: keeps all), and what broken saves left. The newest itself always stays, and so do files with a higher step. */
static inline ZeroResult zero_checkpoint_rotate(const char* folder, uint64_t keep, uint64_t newest) {
    return zero_guard([&]() {
        std::vector<uint64_t> steps;
        std::vector<std::string> names;
        ZERO_TRY(zero_checkpoint_steps(folder, &steps, &names));
        steps.erase(std::upper_bound(steps.begin(), steps.end(), newest), steps.end());
        for (const std::string& name : names) {
            int busy; /* another run's: its own business */
            ZERO_TRY(zero_save_remove_stale((std::string(folder) + "/" + name).c_str(), &busy));
        }
        names.clear();
        for (size_t i = 0; keep > 0 && i + keep < steps.size(); i++) {
            char path[4096];
            ZERO_TRY(zero_checkpoint_path(path, sizeof(path), folder, steps[i]));
            names.push_back(path);
        }
        for (const std::string& name : names)
            if (unlink(name.c_str()) != 0 && errno != ENOENT)
                return zero_error(ZERO_ERROR_SYSTEM, "deleting %.80s: %s", zero_base_name(name.c_str()),
                                  strerror(errno));
        return zero_ok();
    });
}

/* The newest step below `below` that rank 0 sees in the folder, on all ranks; *found 0: none. line gets room for a
   message, and lines for one more line: nothing that comes after the agreement here needs memory. */
static inline ZeroResult zero_checkpoint_newest(ZeroOptimizer* z, const char* folder, uint64_t below,
                                                uint64_t* step, int* found, std::string* line,
                                                std::vector<std::string>* lines) {
    std::vector<uint64_t> steps, all;
    std::vector<std::string> temporary;
    uint64_t own[2] = {0, 0};
    ZERO_TRY(zero_check_between_steps(z, "zero_checkpoint_resume")); /* as in zero_save_run */
    ZERO_TRY(zero_agree(z, zero_guard([&]() {
                            all.resize(2 * (size_t)z->ranks);
                            *line = std::string(sizeof(ZeroResult), ' ');
                            lines->reserve(lines->size() + 1);
                            return z->rank == 0 ? zero_checkpoint_steps(folder, &steps, &temporary)
                                                : zero_ok();
                        })));
    const auto end = std::lower_bound(steps.begin(), steps.end(), below);
    if (end != steps.begin()) own[0] = *(end - 1), own[1] = 1;
    ZERO_TRY(zero_exchange_words(z, own, all.data()));
    *step = all[0];
    *found = (int)all[1];
    return zero_ok();
}

/* Loads step's file if it is whole and its own. */
static inline ZeroResult zero_checkpoint_try(ZeroOptimizer* z, const char* path, uint64_t step,
                                             ZeroCheckpoint* what, ZeroFileHeader* header) {
    ZeroLoad load;
    ZeroResult result = zero_load_check(&load, z, path, what);
    if (result.code == ZERO_OK && load.step != step)
        result = zero_error(ZERO_ERROR_ARGUMENT, "%s holds step %llu: give it its own name, or delete it",
                            zero_base_name(path), (unsigned long long)load.step);
    if (result.code == ZERO_OK) result = zero_load_apply(&load);
    zero_load_close(&load);
    if (header && result.code == ZERO_OK) std::swap(*header, load.header);
    return result;
}

/* The damaged files of steps above `above`, which was loaded, up to `newest`, get out of the way. What cannot be renamed
   stays. */
static inline void zero_checkpoint_set_aside(const char* folder, uint64_t above, uint64_t newest) {
    zero_guard([&]() {
        std::vector<uint64_t> steps;
        std::vector<std::string> temporary;
        ZERO_TRY(zero_checkpoint_steps(folder, &steps, &temporary));
        for (uint64_t step : steps) {
            char path[4096];
            struct stat status;
            ZERO_TRY(zero_checkpoint_path(path, sizeof(path), folder, step));
            if (step > above && step <= newest && lstat(path, &status) == 0 && S_ISREG(status.st_mode))
                rename(path, (std::string(path) + ".damaged").c_str());
        }
        return zero_ok();
    });
}

/* Loads the newest checkpoint of the folder that is whole, as zero_checkpoint_load. passed_over: a line for each newer one
   that is not. *found 0, and ok: there is none at all. If there are some and none is whole, that is an error: to begin
   anew over a damaged run is the user's choice. */
static inline ZeroResult zero_checkpoint_resume(ZeroOptimizer* z, const char* folder, ZeroCheckpoint* what,
                                                ZeroFileHeader* header, std::vector<std::string>* passed_over,
                                                int* found) {
    return zero_guard([&]() {
        uint64_t step = UINT64_MAX, newest = 0;
        *found = 0;
        for (;;) {
            char path[4096];
            std::string line;
            int there = 0;
            ZERO_TRY(zero_checkpoint_newest(z, folder, step, &step, &there, &line, passed_over));
            if (!there) break;
            ZERO_TRY(zero_checkpoint_path(path, sizeof(path), folder, step));
            newest = std::max(newest, step);
            ZeroResult result = zero_checkpoint_try(z, path, step, what, header);
            *found = result.code == ZERO_OK;
            if (*found && z->rank == 0 && !passed_over->empty())
                zero_checkpoint_set_aside(folder, step, newest);
            if (result.code != ZERO_ERROR_FILE) return result;
            line = result.text;
            passed_over->push_back(std::move(line));
        }
        if (passed_over->empty()) return zero_ok();
        return zero_error(ZERO_ERROR_FILE,
                          "none of %zu checkpoints in %.60s is whole (%.100s): delete them to begin anew",
                          passed_over->size(), folder, passed_over->front().c_str());
    });
}

#endif /* LLMC_ZERO_CHECKPOINT_FOLDER_CUH_INCLUDED */
