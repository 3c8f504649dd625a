/* OpenBLAS; a cblas.h of another BLAS lacks its own calls. */
#include <cblas.h>

int main() {
    const float a[4] = {1, 2, 3, 4}, b[4] = {5, 6, 7, 8};
    float c[4] = {};
    openblas_set_num_threads(1);
    cblas_sgemm(CblasColMajor, CblasNoTrans, CblasTrans, 2, 2, 2, 1, a, 2, b, 2, 0, c, 2);
    return c[0] == 26 && c[3] == 44 ? 0 : 1;
}
