/* test/comma_locale.h - a locale whose decimal point is a comma, made by the test itself: few machines have a German one.

       CommaLocale comma("DIR");                     // until the end of the block; made with localedef, which comes with glibc
       if (!comma.set) GTEST_SKIP() << comma.reason;
*/
#pragma once
#include <locale.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include <string>

struct CommaLocale {
    bool set = false;
    std::string reason;

    /* point: what stands for the point, the comma or <U066B> */
    explicit CommaLocale(const std::string& folder, const char* point = "<U002C>") {
        const std::string source = folder + "/source", charmap = folder + "/charmap";
        const std::string made = folder + "/locales";
        mkdir(folder.c_str(), 0777), mkdir(made.c_str(), 0777);
        FILE* file = fopen(source.c_str(), "w");
        if (file) {
            fprintf(file,
                    "comment_char %%\nescape_char /\nLC_NUMERIC\ndecimal_point \"%s\"\nthousands_sep \"\"\n"
                    "grouping -1\nEND LC_NUMERIC\n",
                    point);
            fclose(file);
        }
        file = fopen(charmap.c_str(), "w");
        if (file) {
            fprintf(file, "<code_set_name> UTF-8\n<comment_char> %%\n<escape_char> /\n"
                          "<mb_cur_min> 1\n<mb_cur_max> 6\nCHARMAP\n");
            for (int c = 0; c < 128; c++) fprintf(file, "<U%04X> /x%02x\n", c, c);
            fprintf(file, "<U066B> /xd9/xab\nEND CHARMAP\n"); /* the Arabic point: two bytes */
            fclose(file);
        }
        /* the categories that the source lacks are warnings: -c goes on, with exit code 1 */
        const std::string command = "PATH=$PATH:/usr/bin:/usr/sbin localedef --no-archive -c -i '" + source +
                                    "' -f '" + charmap + "' '" + made + "/comma' >/dev/null 2>&1";
        const int code = system(command.c_str());
        setenv("LOCPATH", made.c_str(), 1);
        set = setlocale(LC_NUMERIC, "comma") != NULL && strcmp(localeconv()->decimal_point, ".") != 0;
        if (!set)
            reason = "NO LOCALE WITH A COMMA: localedef ended with " + std::to_string(code) +
                     "; it is part of glibc (libc-bin)";
    }
    ~CommaLocale() {
        setlocale(LC_NUMERIC, "C");
        unsetenv("LOCPATH");
    }
};
