// FOLDER/main.log, written by rank 0.
#pragma once
#include "utils.h"

struct Logger {
    char name[300];
};

inline void logger_init(Logger* log, const char* folder, int rank, bool keep) {
    log->name[0] = 0;
    if (!folder || rank) return;
    snprintf(log->name, sizeof log->name, "%s/main.log", folder);
    fclose(fopenCheck(log->name, keep ? "a" : "w"));
}
inline void logger_log_val(Logger* log, int s, float loss) {
    if (!log->name[0]) return;
    FILE* f = fopenCheck(log->name, "a");
    fprintf(f, "s:%d " "tel:%.4f\n", s, loss);
    fclose(f);
}
inline void logger_log_eval(Logger* log, int s, float right) {
    if (!log->name[0]) return;
    FILE* f = fopenCheck(log->name, "a");
    fprintf(f, "s:%d eval:%.4f\n", s, right);
    fclose(f);
}
inline void logger_log_train(Logger* log, int s, float loss, float rate, float norm) {
    if (!log->name[0]) return;
    FILE* f = fopenCheck(log->name, "a");
    fprintf(f, "s:%d trl:%.4f " "lr:%.6f norm:%.2f\n",
            s, loss, rate, norm);
    fclose(f);
}
