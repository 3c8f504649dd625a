/* test/test_adamw.cu - llmc_zero/adamw.cuh against float64, bit by bit between its paths, and its rounding.

   Built twice, without and with --use_fast_math: every expectation is the same.

   A Model is what one update works on, in model order, on the host: params, gradients, m, v, masters. `place`
   puts it on the device anywhere (a first offset, base pointers that are not aligned, any cut into chunks),
   runs one update, checks that nothing outside the chunks has changed, and brings it back. So "the same bits
   wherever it lies" is a comparison of two Models. Buffers are float whatever the type; bf16 values are exact
   in them.

   Tolerance against float64, from the number of roundings (u = 2^-24, half a unit in the last place): stated
   in `expect_step`, where it is used; about two units in the last place of the step and half a unit of the
   result.
*/
#include <functional>
#include <gtest/gtest.h>
#include <math.h>
#include <random>
#include <vector>

#include "device.h"
#include "llmc_zero/adamw.cuh"

namespace {

const double u = 1.0 / (1 << 24);
const float kGuard = -7.25f; /* around all data; exact in bf16 */
typedef std::vector<float> Floats;

float float_of(uint32_t b) {
    float x;
    memcpy(&x, &b, 4);
    return x;
}
/* Round to nearest even by another way than the code under test: the two neighbours and their distance. */
uint16_t bf16_nearest(float x) {
    if (isnan(x)) return (uint16_t)(bits_of(x) >> 16 | 0x40);
    uint32_t low = bits_of(x) & 0xffff0000u;
    if (isinf(x)) return (uint16_t)(low >> 16);
    double down = float_of(low), up = (low + 0x10000u) << 1 == 0xff000000u ? copysign(ldexp(1.0, 128), down)
                                                                           : (double)float_of(low + 0x10000u);
    double to_down = fabs((double)x - down), to_up = fabs(up - (double)x);
    bool take_up = to_up < to_down || (to_up == to_down && (low >> 16 & 1));
    return (uint16_t)((low >> 16) + take_up);
}
float bf16_value(uint16_t b) { return float_of((uint32_t)b << 16); }

/* ------------------------------------------------------------------ one update, wherever it lies */

struct Model {
    Floats p, g, m, v, masters;
    bool operator==(const Model& o) const {
        return same(p, o.p) && same(m, o.m) && same(v, o.v) && same(masters, o.masters);
    }
    static bool same(const Floats& a, const Floats& b) {
        return a.size() == b.size() && (a.empty() || memcmp(a.data(), b.data(), 4 * a.size()) == 0);
    }
};

struct Settings {
    ZeroAlgorithm algorithm = ZERO_ADAMW;
    ZeroRounding rounding = ZERO_ROUND_NONE;
    double lr = 0.01, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0.1, momentum = 0.9;
    double grad_scale = 1.0;
    uint64_t t = 1, seed = 5, model_first = 0;
    int skip = 0;
    bool has_m() const { return algorithm != ZERO_SGD || momentum != 0.0; }
    bool has_v() const { return algorithm != ZERO_SGD; }
};

struct Place {
    size_t flat = 64, state = 64;                 /* of element 0; equal modulo 4 */
    size_t shift[5] = {0, 0, 0, 0, 0};            /* elements by which params, grads, masters, m, v are off */
    std::vector<uint32_t> cut;                    /* lengths of the first chunks; the rest is one chunk */
    std::vector<float> lr_factors, decay_factors; /* of each chunk; 1 where there are none */
};

/* Scalars of update t, made as in a real step: the norm of an exact sum, then the launch under test. */
ZeroScalars scalars_for(const Settings& s) {
    std::vector<uint64_t> sum(ZERO_SUM_WORDS, 0);
    zero_exact_add(&sum[ZERO_SUM_SQUARES], 4.0);
    Device<uint64_t> sums(sum);
    Device<ZeroScalars> scalars(std::vector<ZeroScalars>(1, ZeroScalars()));
    ZeroNorm norm = {NULL, 0, NULL, ZERO_FP32, sums.at, sums.at, scalars.at};
    ZeroStepSettings settings = {s.algorithm == ZERO_SGD ? 0.5 : s.beta1,
                                 s.algorithm == ZERO_SGD ? 0.5 : s.beta2,
                                 s.grad_scale,
                                 0.0,
                                 s.seed,
                                 0.0};
    ok(zero_set_t_launch(scalars.at, s.t - 1, NULL));
    ok(zero_norm_finish(&norm, &settings, NULL));
    ZeroScalars result = scalars.get()[0];
    EXPECT_EQ(result.t, s.t);
    result.skip = s.skip;
    return result;
}

Floats with_guards(const Floats& data, size_t first, size_t size) {
    Floats all(size, kGuard);
    std::copy(data.begin(), data.end(), all.begin() + (long)first);
    return all;
}
void take(const Floats& all, size_t first, Floats* data) {
    for (size_t i = 0; i < all.size(); i++)
        if ((i < first || i >= first + data->size()) && all[i] != kGuard)
            ADD_FAILURE() << "a neighbour changed, at " << i << " beside " << first;
    std::copy(all.begin() + (long)first, all.begin() + (long)(first + data->size()), data->begin());
}
std::vector<uint16_t> to_bf16(const Floats& x) {
    std::vector<uint16_t> b(x.size());
    for (size_t i = 0; i < x.size(); i++) b[i] = (uint16_t)(bits_of(x[i]) >> 16);
    return b;
}
Floats from_bf16(const std::vector<uint16_t>& b) {
    Floats x(b.size());
    for (size_t i = 0; i < b.size(); i++) x[i] = bf16_value(b[i]);
    return x;
}

std::vector<ZeroChunk> chunks_for(const Settings& s, const Place& place, size_t n) {
    std::vector<ZeroChunk> chunks;
    for (size_t done = 0; done < n;) {
        size_t c = chunks.size(), count = c < place.cut.size() ? place.cut[c] : n - done;
        if (count > n - done) count = n - done;
        ZeroChunk chunk = {place.flat + done,
                           place.state + done,
                           s.model_first + done,
                           (uint32_t)count,
                           c < place.lr_factors.size() ? place.lr_factors[c] : 1.0f,
                           c < place.decay_factors.size() ? place.decay_factors[c] : 1.0f,
                           (uint32_t)c};
        chunks.push_back(chunk);
        done += count;
    }
    return chunks;
}

Model update(const Model& before, const Settings& s, const Place& place = Place()) {
    const size_t n = before.p.size(),
                 size = n + 64 + (place.flat > place.state ? place.flat : place.state) + 8;
    const bool bf16 = s.rounding != ZERO_ROUND_NONE;
    Model after = before;
    std::vector<ZeroChunk> table = chunks_for(s, place, n);
    Device<ZeroChunk> chunks(table);
    Device<ZeroScalars> scalars(std::vector<ZeroScalars>(1, scalars_for(s)));
    const Floats* given[5] = {&before.p, &before.g, &before.masters, &before.m, &before.v};
    Floats* taken[5] = {&after.p, &after.g, &after.masters, &after.m, &after.v};
    std::vector<Floats> host;
    for (int k = 0; k < 5; k++)
        host.push_back(with_guards(*given[k], (k < 2 ? place.flat : place.state) + place.shift[k], size));
    Device<float> floats[5] = {Device<float>(bf16 ? 1 : size), Device<float>(bf16 ? 1 : size),
                               Device<float>(host[2]), Device<float>(host[3]), Device<float>(host[4])};
    Device<uint16_t> halves[2] = {Device<uint16_t>(to_bf16(host[0])), Device<uint16_t>(to_bf16(host[1]))};
    if (!bf16) floats[0].put(host[0]), floats[1].put(host[1]);
    ZeroUpdate work = {chunks.at,
                       bf16 ? (void*)(halves[0].at + place.shift[0]) : (void*)(floats[0].at + place.shift[0]),
                       bf16 ? (void*)(halves[1].at + place.shift[1]) : (void*)(floats[1].at + place.shift[1]),
                       s.rounding == ZERO_ROUND_MASTERS ? floats[2].at + place.shift[2] : NULL,
                       s.has_m() ? floats[3].at + place.shift[3] : NULL,
                       s.has_v() ? floats[4].at + place.shift[4] : NULL,
                       scalars.at,
                       bf16 ? ZERO_BF16 : ZERO_FP32,
                       s.algorithm,
                       0,
                       0,
                       0,
                       0};
    ZeroHyper hyper = zero_hyper(s.lr, s.beta1, s.beta2, s.eps, s.weight_decay, s.momentum);
    ok(zero_update_launch(&work, &hyper, 0, table.size(), NULL));
    ok(cudaDeviceSynchronize());
    for (int k = 0; k < 5; k++)
        take(k < 2 && bf16 ? from_bf16(halves[k].get()) : floats[k].get(),
             (k < 2 ? place.flat : place.state) + place.shift[k], taken[k]);
    EXPECT_TRUE(Model::same(before.g, after.g)) << "the gradients changed";
    return after;
}

Model random_model(size_t n, ZeroRounding rounding, unsigned seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal(0.0f, 1.0f);
    Model x = {Floats(n), Floats(n), Floats(n), Floats(n), Floats(n)};
    for (size_t i = 0; i < n; i++) {
        x.masters[i] = normal(random);
        x.p[i] = rounding == ZERO_ROUND_NONE ? x.masters[i] : bf16_value(bf16_nearest(x.masters[i]));
        x.g[i] = normal(random) * powf(10.0f, (float)(i % 7) - 4.0f);
        if (rounding != ZERO_ROUND_NONE) x.g[i] = bf16_value(bf16_nearest(x.g[i]));
        x.m[i] = normal(random) * 0.1f;
        x.v[i] = fabsf(normal(random)) * 0.01f;
        if (i % 11 == 3) x.g[i] = 0.0f;
        if (i % 13 == 5) x.m[i] = x.v[i] = 0.0f;
    }
    return x;
}

const ZeroAlgorithm kAlgorithms[] = {ZERO_ADAMW, ZERO_ADAM, ZERO_SGD};
const ZeroRounding kRoundings[] = {ZERO_ROUND_NONE, ZERO_ROUND_MASTERS, ZERO_ROUND_STOCHASTIC};

/* Every algorithm (SGD without momentum and so without m too) in every type. */
void for_each_kernel(const std::function<void(const Settings&)>& use) {
    for (ZeroRounding rounding : kRoundings)
        for (ZeroAlgorithm algorithm : kAlgorithms)
            for (double momentum : {0.9, 0.0}) {
                if (algorithm != ZERO_SGD && momentum == 0.0) continue;
                Settings s;
                s.algorithm = algorithm, s.rounding = rounding, s.momentum = momentum;
                SCOPED_TRACE("algorithm " + std::to_string((int)algorithm) + ", rounding " +
                             std::to_string((int)rounding) + ", momentum " + std::to_string(momentum));
                use(s);
            }
}

/* ------------------------------------------------------------------ against float64 */

/* One element's update in double, and how far fp32 may be from it. */
struct Expected {
    double p, m, v, p_error, m_error, v_error;
};

Expected expect_step(const Settings& s, double p, double g, double m, double v, double lr_factor,
                     double decay_factor) {
    Expected e = {};
    double lr = s.lr * lr_factor, decay = s.weight_decay * decay_factor, g_error, step, step_error;
    g *= s.grad_scale;
    g_error = 2 * u * fabs(g); /* the factor, the product */
    if (s.algorithm != ZERO_ADAMW) {
        g_error += 3 * u * fabs(decay * p) + u * fabs(g + decay * p);
        g += decay * p;
    }
    if (s.algorithm == ZERO_SGD) {
        e.m = s.momentum * m + g;
        e.m_error = g_error + u * fabs(s.momentum * m) + u * fabs(e.m);
        step = lr * e.m;
        step_error = lr * e.m_error + 3 * u * fabs(step);
    } else {
        double w1 = 1 - s.beta1, w2 = 1 - s.beta2, denominator;
        if (s.algorithm == ZERO_ADAMW) p -= lr * decay * p;
        e.m = m + w1 * (g - m);
        e.m_error = w1 * g_error + 2 * u * w1 * fabs(g - m) + u * fabs(e.m);
        e.v = v + w2 * (g * g - v);
        e.v_error = w2 * (2 * fabs(g) * g_error + u * g * g) + 2 * u * w2 * fabs(g * g - v) + u * e.v;
        denominator = sqrt(e.v) / sqrt(1 - pow(s.beta2, (double)s.t)) + s.eps;
        step = lr / (1 - pow(s.beta1, (double)s.t)) * e.m / denominator;
        /* v's error halves under the root; root, its divisor, quotient, sum, quotient, step size (4) */
        step_error = fabs(step) * (e.v > 0 ? 0.5 * e.v_error / e.v : 0) + 9 * u * fabs(step);
        if (e.m != 0) step_error += fabs(step / e.m) * e.m_error;
    }
    e.p = p - step;
    e.p_error = step_error + u * fabs(e.p) +
                (s.algorithm == ZERO_ADAMW ? u * fabs(p) + 3 * u * fabs(lr * decay * p) : 0);
    /* numbers below the smallest normal one may be flushed to zero */
    e.m_error += 1.2e-38, e.v_error += 1.2e-38;
    return e;
}

void expect_near(double is, double due, double error, const char* what, size_t i) {
    if (!(fabs(is - due) <= error))
        ADD_FAILURE() << what << "[" << i << "] is " << is << ", due " << due << " within " << error;
}

void expect_update(const Model& before, const Model& after, const Settings& s, const Place& place) {
    std::vector<ZeroChunk> chunks = chunks_for(s, place, before.p.size());
    size_t i = 0;
    for (const ZeroChunk& chunk : chunks)
        for (uint32_t k = 0; k < chunk.count; k++, i++) {
            bool masters = s.rounding == ZERO_ROUND_MASTERS;
            if (chunk.lr_factor == 0) { /* frozen */
                const bool kept = bits_of(after.p[i]) == bits_of(before.p[i]) &&
                                  (!s.has_m() || bits_of(after.m[i]) == bits_of(before.m[i])) &&
                                  (!s.has_v() || bits_of(after.v[i]) == bits_of(before.v[i])) &&
                                  (!masters || bits_of(after.masters[i]) == bits_of(before.masters[i]));
                if (!kept) ADD_FAILURE() << "frozen element " << i << " has changed";
                continue;
            }
            Expected e =
                expect_step(s, masters ? before.masters[i] : before.p[i], before.g[i],
                            s.has_m() ? before.m[i] : 0.0, before.v[i], chunk.lr_factor, chunk.decay_factor);
            if (s.has_m()) expect_near(after.m[i], e.m, e.m_error, "m", i);
            if (s.has_v()) expect_near(after.v[i], e.v, e.v_error, "v", i);
            if (s.rounding ==
                ZERO_ROUND_STOCHASTIC) { /* within one step of bf16, which is 2^-7 of the value at most */
                expect_near(after.p[i], e.p, e.p_error + fabs(e.p) / 128, "p", i);
            } else {
                expect_near(masters ? after.masters[i] : after.p[i], e.p, e.p_error, "p", i);
                if (masters && bits_of(after.p[i]) >> 16 != bf16_nearest(after.masters[i]))
                    ADD_FAILURE() << "p[" << i << "] is not its master rounded";
            }
        }
}

TEST(AdamW, EveryKernelAgainstFloat64) {
    for_each_kernel([](Settings s) {
        for (uint64_t t : {1, 2, 3, 10, 1000, 1000000}) {
            Place place;
            s.t = t;
            s.grad_scale = t % 2 ? 0.37 : 1.0;
            Model before = random_model(3 * 4096 + 5, s.rounding, (unsigned)t);
            place.cut = std::vector<uint32_t>{4096, 4096, 1000, 3000};
            place.lr_factors = {1.0f, 0.5f, 0.0f, 3.0f};
            place.decay_factors = {1.0f, 0.0f, 2.0f, 0.25f};
            expect_update(before, update(before, s, place), s, place);
        }
    });
}

/* Ten steps from zero state with a gradient of its own each, all in double beside it: how errors add up. */
TEST(AdamW, TenStepsAgainstFloat64) {
    for_each_kernel([](Settings s) {
        const size_t n = 501;
        Model x = random_model(n, s.rounding, 77);
        std::vector<double> p(n), m(n, 0.0), v(n, 0.0), way(n); /* way: how far p came, there and back */
        x.m = x.v = Floats(n, 0.0f);
        for (size_t i = 0; i < n; i++)
            p[i] = s.rounding == ZERO_ROUND_MASTERS ? x.masters[i] : x.p[i], way[i] = fabs(p[i]);
        for (s.t = 1; s.t <= 10; s.t++) {
            x.g = random_model(n, s.rounding, 100 + (unsigned)s.t).g;
            for (size_t i = 0; i < n; i++) {
                Expected e = expect_step(s, p[i], x.g[i], m[i], v[i], 1.0, 1.0);
                way[i] += fabs(e.p - p[i]);
                p[i] = e.p, m[i] = e.m, v[i] = e.v;
            }
            x = update(x, s);
        }
        if (s.rounding == ZERO_ROUND_STOCHASTIC) return; /* a random walk; its mean is tested below */
        for (size_t i = 0; i < n; i++)
            expect_near(s.rounding == ZERO_ROUND_MASTERS ? x.masters[i] : x.p[i], p[i], 12 * u * way[i], "p",
                        i);
    });
}

/* 1 - beta in double: 1.0f - 0.999f would be 1.3e-5 too large, and stay in v. */
TEST(AdamW, OneMinusBetaIsExact) {
    Settings s;
    Model x = {Floats(5, 1.0f), {1.0f, 2.0f, 0.5f, -4.0f, 1024.0f}, Floats(5, 0.0f), Floats(5, 0.0f), {}};
    Model after = update(x, s);
    for (int i = 0; i < 5; i++) {
        EXPECT_EQ(after.v[i], (float)(1.0 - 0.999) * x.g[i] * x.g[i]);
        EXPECT_EQ(after.m[i], (float)(1.0 - 0.9) * x.g[i]);
    }
}

/* beta = 0 keeps nothing of the past, however large it was (torch.lerp counts from the nearer end). */
TEST(AdamW, BetaZeroForgets) {
    Settings s;
    s.beta1 = s.beta2 = 0.0;
    Model x = {Floats(6, 1.0f),
               Floats(6, 3.0f),
               {1e8f, -1e8f, 1e30f, 0.0f, 3.0f, 1.0f},
               {1e8f, 1e16f, 1e30f, 0.0f, 9.0f, 1.0f},
               {}};
    Model after = update(x, s);
    for (int i = 0; i < 6; i++) {
        EXPECT_EQ(after.m[i], 3.0f) << i;
        EXPECT_EQ(after.v[i], 9.0f) << i;
    }
    s.beta1 = 0.3, s.beta2 = 0.4; /* and between: still within the tolerance of float64 */
    x = random_model(1000, ZERO_ROUND_NONE, 3);
    expect_update(x, update(x, s), s, Place());
}

/* Exact inputs: everything is a power of two, so nothing may round. */
TEST(AdamW, ExactNumbers) {
    Settings s;
    s.algorithm = ZERO_SGD, s.lr = 0.5, s.momentum = 0.5, s.weight_decay = 0.25, s.grad_scale = 0.5;
    Model x = {Floats(9, 8.0f), Floats(9, 4.0f), Floats(9, 2.0f), Floats(9, 1.0f), {}};
    Model after = update(x, s); /* g = 2 + 0.25 * 8 = 4, m = 1 + 4, p = 8 - 2.5 */
    EXPECT_EQ(after.m, Floats(9, 5.0f));
    EXPECT_EQ(after.p, Floats(9, 5.5f));
    EXPECT_EQ(after.v, x.v); /* SGD has no v */
    s.algorithm = ZERO_ADAMW, s.eps = 0.0,
    s.beta1 = s.beta2 = 0.5; /* m = v = half of 2 and 4, corrections 1/2 */
    x.m = x.v = Floats(9, 0.0f);
    after = update(x, s); /* p = 8 - 0.5 * 0.25 * 8 - 0.5 * 2 / 2 */
    EXPECT_EQ(after.m, Floats(9, 1.0f));
    EXPECT_EQ(after.v, Floats(9, 2.0f));
    for (float p : after.p) EXPECT_NEAR(p, 6.5f, 1e-6);
}

/* --use_fast_math flushes results below the smallest normal number (1.2e-38) to zero: the one thing that it changes in
   an update. v of a gradient below 3e-18 is such a number at first; the step is the same to the bit, for eps outweighs its root. */
TEST(AdamW, FastMathFlushesDenormalsAndNoMore) {
#ifdef WITH_FAST_MATH
    const bool flushed = true;
#else
    const bool flushed = false;
#endif
    Settings s;
    Model x = {Floats(4, 1.0f), {1e-20f, 1e-17f, 3e-19f, 0.0f}, Floats(4, 0.0f), Floats(4, 0.0f), {}};
    Model after = update(x, s);
    for (int i = 0; i < 4; i++) {
        const float square = x.g[i] * x.g[i], v = (1.0f - 0.999f) * square;
        const bool is_normal = v >= 1.17549435e-38f || v == 0.0f;
        EXPECT_NEAR(after.v[i], is_normal || !flushed ? v : 0.0f, v * 1e-4) << i;
        EXPECT_EQ(after.v[i] > 0.0f, i == 1 || (i != 3 && !flushed)) << i;
    }
    for (int i = 0; i < 4; i++) {
        const double step = s.lr * x.g[i] / (fabs((double)x.g[i]) + s.eps);
        EXPECT_EQ(after.p[i], (float)(1.0 - s.lr * s.weight_decay - step)) << i;
        EXPECT_EQ(after.m[i], (float)(1.0 - 0.9) * x.g[i]) << i;
    }
}

/* ------------------------------------------------------------------ the same bits wherever it lies */

TEST(AdamW, EverySizeAtEveryAlignment) {
    for_each_kernel([](const Settings& s) {
        for (size_t n = 1; n <= 40; n++) {
            Model before = random_model(n, s.rounding, (unsigned)n);
            Model due = update(before, s);
            if (n % 8 == 3) expect_update(before, due, s, Place());
            for (size_t first = 0; first < 8; first++) { /* heads and tails of every length */
                Place place;
                place.flat = 60 + first, place.state = 20 + first;
                ASSERT_TRUE(update(before, s, place) == due) << "n " << n << " at " << first;
                place.cut = std::vector<uint32_t>{(uint32_t)(first + 1), 3, 9};
                ASSERT_TRUE(update(before, s, place) == due) << "n " << n << " at " << first << ", cut";
            }
            for (int k = 0; k < 5; k++) /* the scalar path: any one pointer that is not aligned */
                for (size_t shift = 1; shift < 4; shift++) {
                    Place place;
                    place.shift[k] = shift;
                    ASSERT_TRUE(update(before, s, place) == due)
                        << "n " << n << ", pointer " << k << " off by " << shift;
                }
        }
    });
}

__global__ void split_kernel(const ZeroChunk* chunks, int aligned, uint32_t* out) {
    zero_split_chunk(chunks[blockIdx.x], aligned, &out[2 * blockIdx.x], &out[2 * blockIdx.x + 1]);
}

/* Vectors begin at multiples of four (a GPU faults otherwise, a CPU may not), and leave as little as can be.
 */
TEST(AdamW, VectorsAreAligned) {
    std::vector<ZeroChunk> list;
    for (uint64_t flat : {(uint64_t)0, (uint64_t)1, (uint64_t)2, (uint64_t)3, ((uint64_t)1 << 33) + 5})
        for (uint32_t count = 1; count <= 40; count++) list.push_back({flat, flat, 0, count, 1.0f, 1.0f, 0});
    Device<ZeroChunk> chunks(list);
    Device<uint32_t> out(2 * list.size());
    cudaLaunchConfig_t config = zero_launch_config(list.size(), 1, NULL);
    for (int aligned = 0; aligned < 2; aligned++) {
        ok(cudaLaunchKernelEx(&config, split_kernel, (const ZeroChunk*)chunks.at, aligned, out.at));
        std::vector<uint32_t> split = out.get();
        for (size_t i = 0; i < list.size(); i++) {
            uint32_t head = split[2 * i], vectors = split[2 * i + 1], count = list[i].count;
            ASSERT_LE(head + 4 * vectors, count);
            ASSERT_TRUE(vectors == 0 || (list[i].flat_offset + head) % 4 == 0)
                << list[i].flat_offset << " " << count;
            ASSERT_TRUE(!aligned || head < 4);
            ASSERT_TRUE(aligned ? count - head - 4 * vectors < 4 : vectors == 0);
        }
    }
}

TEST(AdamW, ThousandsOfElementsAtEveryAlignment) {
    for_each_kernel([](const Settings& s) {
        for (size_t n : {1023, 4096, 9001}) {
            Model before = random_model(n, s.rounding, (unsigned)n);
            Place whole;
            Model due = update(before, s, whole);
            for (size_t first = 0; first < 4; first++) {
                Place place;
                place.flat = 100 + first, place.state = 300 + first;
                place.cut = std::vector<uint32_t>{1021, 2, 255, 257, 4096};
                ASSERT_TRUE(update(before, s, place) == due) << "n " << n << " at " << first;
                for (int k = 0; k < 5; k++) place.shift[k] = first;
                ASSERT_TRUE(update(before, s, place) == due)
                    << "n " << n << ", all pointers off by " << first;
            }
        }
    });
}

/* ------------------------------------------------------------------ skip, no state, refusals */

TEST(AdamW, SkipLeavesEveryBit) {
    for_each_kernel([](Settings s) {
        Model before = random_model(4099, s.rounding, 9);
        for (size_t i = 0; i < before.g.size(); i += 3) before.g[i] = NAN;
        s.skip = 1;
        EXPECT_TRUE(update(before, s) == before);
    });
}

/* Case N5: nor is their gradient read, nor does their state change. */
TEST(AdamW, FactorZeroFreezesParametersAndState) {
    for_each_kernel([](Settings s) {
        Place place;
        int moved = 0;
        s.lr = 10;
        place.cut = std::vector<uint32_t>{100, 100};
        place.lr_factors = {1.0f, 0.0f, 1.0f};
        Model before = random_model(300, s.rounding, 9);
        for (size_t i = 100; i < 200; i++) before.g[i] = i % 2 ? NAN : INFINITY;
        Model after = update(before, s, place);
        expect_update(before, after, s, place);
        for (size_t i = 0; i < 300; i++) {
            if (i / 100 != 1) moved += after.p[i] != before.p[i];
        }
        EXPECT_GE(moved, 150);
    });
}

TEST(AdamW, NothingToDoLaunchesNothing) {
    ZeroHyper hyper = zero_hyper(0.1, 0.9, 0.999, 1e-8, 0, 0);
    float dummy = 0;
    ZeroUpdate work = {NULL, NULL, NULL, NULL, &dummy, &dummy, NULL, ZERO_FP32, ZERO_ADAMW, 0, 0, 0, 0};
    EXPECT_EQ(zero_update_launch(&work, &hyper, 0, 0, NULL).code, ZERO_OK);
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

TEST(AdamW, MissingStateIsRefusedInWords) {
    ZeroHyper hyper = zero_hyper(0.1, 0.9, 0.999, 1e-8, 0, 0.9);
    float dummy = 0;
    for (size_t chunks :
         {(size_t)0, (size_t)1}) { /* on a rank that owns nothing too, so that all ranks see it */
        ZeroUpdate work = {NULL, NULL, NULL, NULL, NULL, &dummy, NULL, ZERO_FP32, ZERO_ADAMW, 0, 0, 0, 0};
        EXPECT_NE(strstr(zero_update_launch(&work, &hyper, 0, chunks, NULL).text, "exp_avg"), nullptr);
        work.exp_avg = &dummy, work.exp_avg_sq = NULL, work.algorithm = ZERO_ADAM;
        EXPECT_NE(strstr(zero_update_launch(&work, &hyper, 0, chunks, NULL).text, "exp_avg_sq"), nullptr);
        work.exp_avg = NULL, work.algorithm = ZERO_SGD; /* momentum 0.9 with nowhere to keep it */
        EXPECT_NE(strstr(zero_update_launch(&work, &hyper, 0, chunks, NULL).text, "momentum 0.9"), nullptr);
    }
    ZeroUpdate work = {NULL, NULL, NULL, NULL, &dummy, &dummy, NULL, ZERO_FP32, ZERO_ADAMW, 0, 0, 0, 0};
    EXPECT_NE(strstr(zero_update_launch(&work, &hyper, 0, (size_t)1 << 31, NULL).text, "2147483648 chunks"),
              nullptr);
}

/* ------------------------------------------------------------------ rounding */

__global__ void round_nearest_kernel(const uint32_t* in, uint32_t* out, size_t count) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) out[i] = zero_to_bf16(__uint_as_float(in[i]));
}
__global__ void round_noise_kernel(const uint32_t* in, uint32_t noise, uint32_t* out, size_t count) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) out[i] = zero_round_stochastic(__uint_as_float(in[i]), noise);
}
__global__ void noise_kernel(const ZeroScalars* s, uint64_t first, uint32_t* out, size_t count) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) out[i] = zero_noise(s->noise_key, first + i);
}

cudaLaunchConfig_t threads_for(size_t count) { return zero_launch_config((count + 255) / 256, 256, NULL); }

/* All upper halves with lower halves round the tie, zero, denormal, infinite and NaN among them. */
std::vector<uint32_t> patterns() {
    std::vector<uint32_t> in;
    for (uint32_t high = 0; high < 65536; high++)
        for (uint32_t low : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) in.push_back(high << 16 | low);
    return in;
}

TEST(Rounding, ToNearestEvenForAllUpperHalves) {
    std::vector<uint32_t> in = patterns();
    Device<uint32_t> from(in), to(in.size());
    cudaLaunchConfig_t config = threads_for(in.size());
    ok(cudaLaunchKernelEx(&config, round_nearest_kernel, (const uint32_t*)from.at, to.at, in.size()));
    std::vector<uint32_t> out = to.get();
    for (size_t i = 0; i < in.size(); i++) {
        float x = float_of(in[i]), y = bf16_value((uint16_t)out[i]);
        ASSERT_LE(out[i], 0xffffu);
        ASSERT_EQ(isnan(x), isnan(y)) << std::hex << in[i];
        ASSERT_EQ(out[i], isnan(x) ? out[i] : bf16_nearest(x)) << std::hex << in[i];
    }
}

TEST(Rounding, StochasticGivesANeighbourAndNeverMovesExactValues) {
    std::vector<uint32_t> in = patterns();
    Device<uint32_t> from(in), to(in.size());
    cudaLaunchConfig_t config = threads_for(in.size());
    for (uint32_t noise : {0u, 1u, 0x7fffu, 0x8000u, 0xfffeu, 0xffffu, 0xabcd0000u, 0xffffffffu}) {
        ok(cudaLaunchKernelEx(&config, round_noise_kernel, (const uint32_t*)from.at, noise, to.at,
                              in.size()));
        std::vector<uint32_t> out = to.get();
        for (size_t i = 0; i < in.size(); i++) {
            uint32_t high = in[i] >> 16, low = in[i] & 0xffff;
            if ((high & 0x7f80) == 0x7f80) { /* infinite stays, NaN stays NaN */
                ASSERT_EQ(isnan(bf16_value((uint16_t)out[i])), isnan(float_of(in[i])));
                ASSERT_TRUE(isnan(float_of(in[i])) || out[i] == high);
                continue;
            }
            /* up if the part cut off and the noise reach the next value together: probability low / 65536 */
            ASSERT_EQ(out[i], high + (low + (noise & 0xffff) >= 0x10000)) << std::hex << in[i];
        }
    }
}

std::vector<uint32_t> noise(uint64_t t, uint64_t seed, uint64_t first, size_t count) {
    Settings s;
    s.t = t, s.seed = seed;
    Device<ZeroScalars> scalars(std::vector<ZeroScalars>(1, scalars_for(s)));
    Device<uint32_t> out(count);
    cudaLaunchConfig_t config = threads_for(count);
    ok(cudaLaunchKernelEx(&config, noise_kernel, (const ZeroScalars*)scalars.at, first, out.at, count));
    return out.get();
}

/* How often two streams of noise say "up" together, in standard deviations from chance. */
double correlation(const std::vector<uint32_t>& a, const std::vector<uint32_t>& b, size_t lag = 0) {
    double sum = 0;
    size_t count = a.size() - lag;
    for (size_t i = 0; i < count; i++) sum += ((a[i + lag] & 0xffff) - 32767.5) * ((b[i] & 0xffff) - 32767.5);
    return sum / (65536.0 * 65536.0 / 12) / sqrt((double)count);
}

TEST(Rounding, NoiseIsEvenAndUncorrelated) {
    const size_t n = 1 << 20;
    for (uint64_t t : {1, 2, 1000}) {
        std::vector<uint32_t> x = noise(t, 0, 0, n);
        std::vector<int> bins(65536, 0);
        double chi = 0;
        for (uint32_t k : x) bins[k & 0xffff]++;
        for (int b : bins) chi += (b - 16.0) * (b - 16.0) / 16.0;
        EXPECT_NEAR(chi, 65535, 5 * sqrt(2 * 65535.0)); /* chi square of 65535 degrees */
        for (size_t lag : {1, 2, 3, 4, 256, 4096})
            EXPECT_LT(fabs(correlation(x, x, lag)), 5) << lag;                 /* neighbours */
        EXPECT_LT(fabs(correlation(x, noise(t + 1, 0, 0, n))), 5);             /* successive steps */
        EXPECT_LT(fabs(correlation(x, noise(t, 1, 0, n))), 5);                 /* another seed */
        EXPECT_LT(fabs(correlation(x, noise(t, 0, (uint64_t)1 << 32, n))), 5); /* beyond 2^32 */
        EXPECT_LT(fabs(correlation(x, noise(t, 0, (uint64_t)3 << 32, n))), 5);
        EXPECT_EQ(x, noise(t, 0, 0, n));                       /* and the same again */
        std::vector<uint32_t> later = noise(t, 0, 1000, 1000); /* a function of the index alone */
        EXPECT_TRUE(std::equal(later.begin(), later.end(), x.begin() + 1000));
    }
}

/* Each bit of noise that is used is even by itself, over elements and over steps. */
TEST(Rounding, EveryBitOfNoiseIsEven) {
    const size_t n = 1 << 18;
    std::vector<uint32_t> x = noise(7, 3, 12345, n), steps;
    for (uint64_t t = 1; t <= 2000; t++) steps.push_back(noise(t, 3, 99, 1)[0]);
    for (int bit = 0; bit < 16; bit++) {
        double ones = 0, ones_in_steps = 0;
        for (uint32_t k : x) ones += k >> bit & 1;
        for (uint32_t k : steps) ones_in_steps += k >> bit & 1;
        EXPECT_LT(fabs(ones - n / 2.0), 5 * sqrt(n / 4.0)) << bit;
        EXPECT_LT(fabs(ones_in_steps - 1000), 5 * sqrt(500.0)) << bit;
    }
}

Settings plain_sgd(double lr) { /* p - lr * g and nothing else */
    Settings s;
    s.algorithm = ZERO_SGD, s.rounding = ZERO_ROUND_STOCHASTIC, s.momentum = 0, s.weight_decay = 0, s.lr = lr;
    return s;
}

/* A million elements of 1, which has bf16 neighbours at 2^-8 below: p - lr * g lies a fraction f of the way
 * down. */
TEST(Rounding, StochasticUpdateIsUnbiased) {
    const size_t n = 1000000;
    for (double f : {1.0 / 65536, 0.01, 0.25, 0.5, 0.7, 65535.0 / 65536}) {
        Settings s = plain_sgd(ldexp(f, -8));
        Model x = {Floats(n, 1.0f), Floats(n, 1.0f), {}, {}, {}};
        double drop = (1.0 - (double)(float)(1.0f - (float)s.lr)) * 256; /* the fraction that fp32 sees */
        Floats last;
        for (s.t = 1; s.t <= 2; s.t++) { /* the second from the same place, with other noise */
            Model after = update(x, s);
            double down = 0;
            for (float p : after.p) {
                ASSERT_TRUE(p == 1.0f || p == 1.0f - 1.0f / 256) << p; /* a neighbour, always */
                down += p != 1.0f;
            }
            EXPECT_LT(fabs(down - n * drop), 5 * sqrt(n * drop * (1 - drop)) + 1) << f << ", step " << s.t;
            EXPECT_NE(after.p, last) << "the same noise in two steps";
            last = after.p;
        }
    }
    Settings s = plain_sgd(1.0); /* exact values never move */
    Model x = {Floats(5000, 1.0f), Floats(5000, 0.25f), {}, {}, {}};
    EXPECT_EQ(update(x, s).p, Floats(5000, 0.75f));
}

/* Over many steps the mean follows the exact sum, where rounding to nearest would stand still (256 + 1). */
TEST(Rounding, ManySmallStepsAddUp) {
    const size_t n = 4000;
    const int steps = 64;
    Settings s = plain_sgd(1.0);
    Model x = {Floats(n, 256.0f), Floats(n, -0.25f), {}, {}, {}};
    for (s.t = 1; s.t <= (uint64_t)steps; s.t++) x.p = update(x, s).p;
    double mean = 0;
    for (float p : x.p) mean += p / n;
    /* each step rounds to a multiple of 2: variance at most 2 * 0.25 * (2 - 0.25) a step, half that at least
     */
    EXPECT_LT(fabs(mean - (256 + 0.25 * steps)), 5 * sqrt(0.25 * 1.75 * steps / n)) << mean;
}

TEST(Rounding, NoiseDependsOnSeedStepAndModelIndexOnly) {
    Settings s = plain_sgd(ldexp(0.5, -8));
    const size_t n = 20000;
    Model x = {Floats(n, 1.0f), Floats(n, 1.0f), {}, {}, {}};
    s.t = 3;
    Floats due = update(x, s).p;
    for (size_t first : {0, 1, 2, 3, 17}) { /* other places and cuts: the same */
        Place place;
        place.flat = place.state = 64 + first;
        place.cut = std::vector<uint32_t>{(uint32_t)(5 + first), 4096, 1, 2, 3, 4095};
        EXPECT_EQ(update(x, s, place).p, due);
    }
    auto differ = [&](const Settings& other) { /* of n coin tosses half should */
                                               Floats p = update(x, other).p;
                                               double count = 0;
                                               for (size_t i = 0; i < n; i++) count += p[i] != due[i];
                                               return fabs(count - n / 2.0) < 5 * sqrt(n / 4.0);
    };
    Settings other = s;
    other.seed++;
    EXPECT_TRUE(differ(other));
    other = s, other.t++;
    EXPECT_TRUE(differ(other));
    for (uint64_t shift : {(uint64_t)1 << 32, (uint64_t)1 << 33, (uint64_t)1 << 40}) { /* beyond 32 bits */
        other = s, other.model_first = shift;
        EXPECT_TRUE(differ(other)) << shift;
    }
    other = s, other.model_first = ((uint64_t)1 << 32) - 7; /* a chunk that crosses 2^32, cut there and not */
    Place place;
    place.cut = std::vector<uint32_t>{7};
    EXPECT_EQ(update(x, other).p, update(x, other, place).p);
}

/* ------------------------------------------------------------------ E3: any number of ranks, from a real
 * layout */

/* Three steps of a model on `ranks` ranks, each with a shard of its own, updated bucket by bucket as in a
 * step. */
Model run_on_ranks(const Settings& settings, const std::vector<ZeroSegment>& segments, int ranks,
                   size_t bucket_bytes, bool whole) {
    Settings s = settings;
    const bool bf16 = s.rounding != ZERO_ROUND_NONE;
    ZeroLayoutConfig config = zero_layout_config(ranks, bf16 ? ZERO_BF16 : ZERO_FP32);
    ZeroLayout layout;
    config.bucket_bytes = bucket_bytes;
    ok(zero_layout(&layout, segments.data(), (int)segments.size(), &config));
    const size_t padded = zero_padded_count(&layout),
                 state_count = whole ? padded : zero_shard_count(&layout);
    Model x = random_model(layout.model_count, s.rounding, 21);
    std::vector<size_t> flat(layout.model_count); /* of each model index */
    for (int i = 0; i < layout.segments_count; i++)
        for (size_t k = 0; k < layout.segments[i].count; k++)
            flat[layout.segments[i].model_offset + k] = layout.segments[i].flat_offset + k;
    Floats p(padded, 0.0f), g(padded, 0.0f);
    for (size_t i = 0; i < flat.size(); i++) p[flat[i]] = x.p[i];
    Device<float> params(p), grads(padded);
    Device<uint16_t> half_params(to_bf16(p)), half_grads(padded);
    std::vector<std::vector<float>> state[3]; /* m, v, masters by rank, from step to step on the host */
    for (auto& array : state) array.assign((size_t)ranks, Floats(state_count, 0.0f));
    for (s.t = 1; s.t <= 3; s.t++) {
        Device<ZeroScalars> scalars(std::vector<ZeroScalars>(1, scalars_for(s)));
        Floats gradient = random_model(layout.model_count, s.rounding, 30 + (unsigned)s.t).g;
        for (size_t i = 0; i < flat.size(); i++) g[flat[i]] = gradient[i];
        grads.put(g), half_grads.put(to_bf16(g));
        for (int rank = 0; rank < (whole ? 1 : ranks); rank++) {
            ZeroChunk* table;
            std::vector<size_t> first((size_t)layout.buckets_count + 1);
            ok(zero_chunk_table(&layout, whole ? ZERO_ALL_RANKS : rank, ZERO_CHUNK_MAX_COUNT, &table,
                                first.data()));
            std::vector<ZeroChunk> list(table, table + first[layout.buckets_count]);
            free(table);
            if (s.t == 1) /* masters = params */
                for (const ZeroChunk& c : list)
                    for (uint32_t k = 0; k < c.count; k++)
                        state[2][rank][c.state_offset + k] = p[c.flat_offset + k];
            Device<ZeroChunk> chunks(list);
            Device<float> m(state[0][rank]), v(state[1][rank]), masters(state[2][rank]);
            ZeroUpdate work = {chunks.at,
                               bf16 ? (void*)half_params.at : (void*)params.at,
                               bf16 ? (void*)half_grads.at : (void*)grads.at,
                               s.rounding == ZERO_ROUND_MASTERS ? masters.at : NULL,
                               s.has_m() ? m.at : NULL,
                               s.has_v() ? v.at : NULL,
                               scalars.at,
                               layout.dtype,
                               s.algorithm,
                               0,
                               0,
                               0,
                               0};
            ZeroHyper hyper = zero_hyper(s.lr, s.beta1, s.beta2, s.eps, s.weight_decay, s.momentum);
            for (int b = 0; b < layout.buckets_count; b++)
                ok(zero_update_launch(&work, &hyper, first[b], first[b + 1] - first[b], NULL));
            ok(cudaDeviceSynchronize());
            state[0][rank] = m.get(), state[1][rank] = v.get(), state[2][rank] = masters.get();
        }
    }
    Floats end = bf16 ? from_bf16(half_params.get()) : params.get();
    for (size_t i = 0; i < flat.size(); i++) x.p[i] = end[flat[i]];
    x.m = x.v = x.masters = Floats(); /* their order is another on each number of ranks */
    zero_layout_free(&layout);
    return x;
}

TEST(AdamW, E3_the_same_bits_on_any_number_of_ranks) {
    std::vector<ZeroSegment> segments = {zero_segment("a", 5000, 0), zero_segment("b", 3, 0),
                                         zero_segment("c", 777, 1), zero_segment("d", 130, 2)};
    segments[1].decay_factor = 0, segments[2].lr_factor = 0.5f;
    for_each_kernel([&](const Settings& s) {
        Model due = run_on_ranks(s, segments, 1, 0, false);
        for (int ranks = 1; ranks <= 4; ranks++)
            for (size_t bucket_bytes : {(size_t)0, (size_t)4096}) {
                EXPECT_TRUE(run_on_ranks(s, segments, ranks, bucket_bytes, false) == due)
                    << ranks << " ranks, buckets of " << bucket_bytes;
                EXPECT_TRUE(run_on_ranks(s, segments, ranks, bucket_bytes, true) == due)
                    << ranks << " ranks, everywhere";
            }
    });
}

} // namespace
