/* llmc_zero/numbers.cuh - numbers as text that is the same in every locale.

   A host program may have called setlocale: printf then writes 0,9 and strtod does not read 0.9. What files hold goes through
   these functions. They set no locale, not even the thread's own for a moment: they write in the one there is and put the
   point in afterwards, so that nothing can fail and no other thread sees anything. (to_chars would do the same; for doubles
   only compilers have it that are newer than what nvcc is used with.)

       fprintf(file, "loss:%s", zero_number_text(loss, 9).text);
       double loss;
       if (!zero_number_value(text, &loss)) ...

   Host only, C99 and C++.

   defines: ZeroNumberText, zero_number_text, zero_number_fixed, zero_number_shortest, zero_number_value
*/
#ifndef LLMC_ZERO_NUMBERS_CUH_INCLUDED
#define LLMC_ZERO_NUMBERS_CUH_INCLUDED

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct ZeroNumberText {
    char text[48];
} ZeroNumberText;

/* What a number is made of but its point: digits, signs, an exponent's e, the letters of inf and nan. */
static inline int zero_number_letter(char c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '+' || c == '-';
}

/* The locale's point may have several bytes. */
static inline ZeroNumberText zero_number_point(ZeroNumberText number) {
    char *to = number.text, *from;
    for (from = number.text; *from; from++)
        if (zero_number_letter(*from))
            *to++ = *from;
        else if (to == number.text || to[-1] != '.')
            *to++ = '.';
    *to = '\0';
    return number;
}

/* As %.{digits}g writes it in the C locale; digits: 1 .. 17. */
static inline ZeroNumberText zero_number_text(double value, int digits) {
    ZeroNumberText number;
    snprintf(number.text, sizeof(number.text), "%.*g", digits, value);
    return zero_number_point(number);
}

/* As %.{decimals}f, decimals 0 .. 15, as long as that has at most 32 characters or so; larger numbers as %.17g. */
static inline ZeroNumberText zero_number_fixed(double value, int decimals) {
    ZeroNumberText number;
    if (!(value > -1e15 && value < 1e15)) return zero_number_text(value, 17);
    snprintf(number.text, sizeof(number.text), "%.*f", decimals, value);
    return zero_number_point(number);
}

/* Reads a number that fills the whole text; its point may be a comma: earlier versions wrote what the locale said. 0: it is no
   number, and *value is as it was. */
static inline int zero_number_value(const char* text, double* value) {
    char here[128], point[16];
    char *to = here, *end;
    double found;
    size_t bytes;
    snprintf(point, sizeof(point), "%.1f", 0.0); /* the locale's own, between two zeros */
    bytes = strlen(point) - 2;
    for (; *text; text++) {
        const size_t more = *text == '.' || *text == ',' ? bytes : 1;
        if (!zero_number_letter(*text) && *text != '.' && *text != ',') return 0;
        if ((size_t)(to - here) + more >= sizeof(here)) return 0;
        memcpy(to, *text == '.' || *text == ',' ? point + 1 : text, more);
        to += more;
    }
    *to = '\0';
    found = strtod(here, &end);
    if (end == here || *end != '\0') return 0;
    *value = found;
    return 1;
}

/* The fewest digits that are this very number: 0.9, not 0.90000000000000002. */
static inline ZeroNumberText zero_number_shortest(double value) {
    int digits;
    for (digits = 1; digits < 17; digits++) {
        const ZeroNumberText shorter = zero_number_text(value, digits);
        double again;
        if (zero_number_value(shorter.text, &again) && again == value) return shorter;
    }
    return zero_number_text(value, 17);
}

#endif /* LLMC_ZERO_NUMBERS_CUH_INCLUDED */
