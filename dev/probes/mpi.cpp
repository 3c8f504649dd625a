/* MPI, started on two ranks: the mpirun of another MPI starts two worlds of one rank each. */
#include <mpi.h>
#include <string.h>

int main(int argc, char** argv) {
    void* const called[] = {(void*)MPI_Abort, (void*)MPI_Error_string};
    int initialized = 1, finalized = 0, rank = 0, size = 0;
    MPI_Initialized(&initialized);
    if (initialized || MPI_Init(&argc, &argv) != MPI_SUCCESS) return 1;
    MPI_Comm comm;
    MPI_Comm_dup(MPI_COMM_WORLD, &comm);
    MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN);
    MPI_Comm_rank(comm, &rank);
    MPI_Comm_size(comm, &size);
    char text[MPI_MAX_ERROR_STRING] = "?", mine = (char)('a' + rank), all[2] = {};
    if (size == 2) MPI_Allgather(&mine, 1, MPI_BYTE, all, 1, MPI_BYTE, comm);
    MPI_Barrier(comm);
    MPI_Comm_free(&comm);
    MPI_Finalize();
    MPI_Finalized(&finalized);
    return finalized && called[0] && text[0] == '?' && memcmp(all, "ab", 2) == 0 ? 0 : 1;
}
