/* GoogleTest, with its library and main(). */
#include <gtest/gtest.h>

class Fixture : public testing::Test {
  protected:
    int one = 1;
};

TEST_F(Fixture, Links) {
    SCOPED_TRACE("probe");
    testing::GTEST_FLAG(death_test_style) = "threadsafe";
    ASSERT_EQ(one, 1);
    EXPECT_NEAR(one, 1.0, 1e-9);
    EXPECT_STREQ("a", "a");
    EXPECT_EXIT(_Exit(3), testing::ExitedWithCode(3), "");
}
