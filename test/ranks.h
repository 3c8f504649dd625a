/* test/ranks.h - what unit tests that run on real ranks share: the world, checks of results, start-up. */
#pragma once
#include <gtest/gtest.h>

#include "llmc_zero/world.cuh"

static ZeroWorld world;

#define OK(call)                                                               \
    do {                                                                       \
        ZeroResult ok_result = (call);                                         \
        ASSERT_EQ(ok_result.code, ZERO_OK) << #call << ": " << ok_result.text; \
    } while (0)

/* First thing in main. Ranks are MPI's, or as in train_mlp: -pi fs -pf FOLDER -pn RANKS -pr RANK. 0: fine; else this rank's
   exit code, and the other ranks are ended. */
static inline int start_ranks(int argc, char** argv) {
    ZeroWorldConfig config = {};
    ::testing::InitGoogleTest(&argc, argv);
    for (int i = 1; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "-pi") == 0) config.method = argv[i + 1];
        if (strcmp(argv[i], "-pf") == 0) config.fs_path = argv[i + 1];
        if (strcmp(argv[i], "-pn") == 0) config.ranks = atoi(argv[i + 1]);
        if (strcmp(argv[i], "-pr") == 0) config.rank = atoi(argv[i + 1]);
    }
    ZeroResult result = zero_world_start(&world, &config, &argc, &argv);
    if (result.code == ZERO_OK) result = zero_world_device(&world);
    if (result.code == ZERO_OK) return 0;
    fprintf(stderr, "%s\n", result.text);
    zero_world_abort(&world, 1);
    return 1;
}
