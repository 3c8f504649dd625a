/* test/test_numbers.cu - llmc_zero/numbers.cuh: the C locale's text, in the C locale and in one with a comma. */
#include <float.h>
#include <math.h>
#include <unistd.h>

#include <gtest/gtest.h>

#include "../llmc_zero/numbers.cuh"
#include "comma_locale.h"

static void check_numbers() {
    double value = 7.0;
    EXPECT_STREQ(zero_number_text(0.1, 9).text, "0.1");
    EXPECT_STREQ(zero_number_text(-1234567.25, 9).text, "-1234567.25");
    EXPECT_STREQ(zero_number_text(1.5e-30, 9).text, "1.5e-30");
    EXPECT_STREQ(zero_number_text(3.0, 9).text, "3");
    EXPECT_STREQ(zero_number_text(INFINITY, 9).text, "inf");
    EXPECT_STREQ(zero_number_fixed(2.0 / 3.0, 3).text, "0.667");
    EXPECT_STREQ(zero_number_fixed(123456789012345.0, 6).text, "123456789012345.000000");
    EXPECT_STREQ(zero_number_fixed(1e300, 6).text, "1.0000000000000001e+300");
    EXPECT_STREQ(zero_number_shortest(0.9).text, "0.9");
    EXPECT_STREQ(zero_number_shortest(1e-8).text, "1e-08");
    EXPECT_STREQ(zero_number_shortest(1.0 / 3.0).text, "0.3333333333333333");
    for (double x : {0.0, -0.0, 1.0 / 3.0, 2.0 / 3.0, DBL_MAX, -DBL_MAX, DBL_MIN, 4.9406564584124654e-324,
                     1e22, 0.1 + 0.2}) {
        ASSERT_TRUE(zero_number_value(zero_number_shortest(x).text, &value)) << x;
        EXPECT_EQ(value, x);
        EXPECT_EQ(signbit(value), signbit(x));
    }
    EXPECT_TRUE(zero_number_value("0,9", &value)) << "an earlier version's, from a locale with a comma";
    EXPECT_EQ(value, 0.9);
    EXPECT_TRUE(zero_number_value("1,5e-3", &value));
    EXPECT_EQ(value, 1.5e-3);
    EXPECT_TRUE(zero_number_value("inf", &value));
    EXPECT_TRUE(isinf(value));
    EXPECT_TRUE(zero_number_value("nan", &value));
    EXPECT_TRUE(isnan(value));
    value = 7.0;
    for (const char* bad :
         {"", " 1", "1 ", "1.2.3", "1,2,3", "1.2,3", "x", "0.9x", "e", "-", ".", "1;2", "\xff"})
        EXPECT_FALSE(zero_number_value(bad, &value)) << bad;
    EXPECT_FALSE(zero_number_value(std::string(200, '1').c_str(), &value));
    EXPECT_EQ(value, 7.0);
}

TEST(Numbers, InTheCLocale) { check_numbers(); }

class WithAPoint : public testing::TestWithParam<const char*> {};

TEST_P(WithAPoint, InAnotherLocale) {
    char name[] = "/tmp/test_numbers.XXXXXX", text[32];
    ASSERT_NE(mkdtemp(name), nullptr);
    {
        CommaLocale comma(name, GetParam());
        EXPECT_EQ(system((std::string("rm -rf ") + name).c_str()), 0);
        if (!comma.set) GTEST_SKIP() << comma.reason;
        snprintf(text, sizeof(text), "%g", 0.5);
        ASSERT_STRNE(text, "0.5") << "else this test shows nothing";
        check_numbers();
    }
    snprintf(text, sizeof(text), "%g", 0.5);
    ASSERT_STREQ(text, "0.5");
}
INSTANTIATE_TEST_SUITE_P(Locales, WithAPoint, testing::Values("<U002C>", "<U066B>"));
