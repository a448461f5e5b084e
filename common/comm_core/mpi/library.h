// The MPI library itself: starting and ending it, and its errors as exceptions.
#pragma once

#include <mpi.h>

#include <string>

namespace comm_core::mpi {

// Throws c10::DistBackendError "<call>: <MPI_Error_string>" unless `code` is MPI_SUCCESS.
void check(int code, const char* call);

// What MPI_Error_string says of `code`.
std::string error_text(int code);

// True between MPI_Init and MPI_Finalize, whoever calls them.
bool library_usable();

// "Open MPI v4.1.4, ...": may be called before `start_library`.
std::string library_version();

// Initialises MPI unless another library of the process has; returns true if it did, and then
// `end_library` must follow on the same thread. Throws c10::DistBackendError if the threads that
// call MPI here are more than the library allows.
bool start_library();

// MPI_Finalize, which waits for all processes of the job. Errors are ignored: nobody is left to
// be told.
void end_library();

}  // namespace comm_core::mpi
