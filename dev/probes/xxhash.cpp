/* xxHash: XXH3 gives its final values from 0.8 on. */
#define XXH_INLINE_ALL
#include <xxhash.h>

static_assert(XXH_VERSION_NUMBER >= 800, "xxHash 0.8 or later is needed: before, XXH3 had other values");

int main() {
    XXH3_state_t state;
    XXH3_64bits_reset(&state);
    XXH3_64bits_update(&state, "llmc", 4);
    XXH3_64bits_update(&state, "_zero", 5);
    return XXH3_64bits_digest(&state) == XXH3_64bits("llmc_zero", 9) &&
                   XXH3_64bits("", 0) == 0x2d06800538d394c2ull
               ? 0
               : 1;
}
