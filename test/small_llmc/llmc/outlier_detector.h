// How far a number is from those before it, in standard deviations; NaN until the window is full.
#pragma once
#include <math.h>

struct OutlierDetector {
    double seen[6], total, squares;
    int count;
};

inline void init_detector(OutlierDetector* d) { *d = OutlierDetector{}; }

inline double update_detector(OutlierDetector* d, double x)
{
    const int window = 6, place = d->count % window;
    const bool full = d->count >= window;
    const double mean = d->total / window, variance = d->squares / window - mean * mean;
    d->total += x - d->seen[place];
    d->squares += x * x - d->seen[place] * d->seen[place];
    d->seen[place] = x;
    d->count++;
    return full ? (x - mean) / sqrt(fmax(variance, 1e-12)) : NAN;
}
