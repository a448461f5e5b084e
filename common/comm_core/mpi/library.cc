#include "library.h"

#include <c10/util/Exception.h>

namespace comm_core::mpi {
namespace {

const char* name_of(int level) {
  switch (level) {
    case MPI_THREAD_SINGLE: return "MPI_THREAD_SINGLE";
    case MPI_THREAD_FUNNELED: return "MPI_THREAD_FUNNELED";
    case MPI_THREAD_SERIALIZED: return "MPI_THREAD_SERIALIZED";
    default: return "MPI_THREAD_MULTIPLE";
  }
}

}  // namespace

std::string error_text(int code) {
  char text[MPI_MAX_ERROR_STRING + 1] = "";
  int length = 0;
  if (MPI_Error_string(code, text, &length) != MPI_SUCCESS) {
    return "MPI error " + std::to_string(code);
  }
  return std::string(text, static_cast<size_t>(length));
}

void check(int code, const char* call) {
  TORCH_CHECK_WITH(DistBackendError, code == MPI_SUCCESS, call, ": ", error_text(code));
}

bool library_usable() {
  int begun = 0;
  int ended = 0;
  MPI_Initialized(&begun);
  MPI_Finalized(&ended);
  return begun != 0 && ended == 0;
}

std::string library_version() {
  char text[MPI_MAX_LIBRARY_VERSION_STRING + 1] = "";
  int length = 0;
  MPI_Get_library_version(text, &length);
  return std::string(text, static_cast<size_t>(length));
}

bool start_library() {
  int begun = 0;
  int ended = 0;
  MPI_Initialized(&begun);
  MPI_Finalized(&ended);
  TORCH_CHECK_WITH(DistBackendError, ended == 0,
                   "MPI has already been finalised in this process and cannot start again");
  int level = MPI_THREAD_SINGLE;
  if (begun != 0) {
    check(MPI_Query_thread(&level), "MPI_Query_thread");
    TORCH_CHECK_WITH(DistBackendError, level >= MPI_THREAD_MULTIPLE,
                     "another library initialised MPI with ", name_of(level),
                     ", but a second user of MPI in the process needs MPI_THREAD_MULTIPLE");
    return false;
  }
  check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level), "MPI_Init_thread");
  // Its errors are fatal by default; a failing MPI_Comm_create_group would end the process.
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  MPI_Comm_set_errhandler(MPI_COMM_SELF, MPI_ERRORS_RETURN);
  TORCH_CHECK_WITH(DistBackendError, level >= MPI_THREAD_SERIALIZED, "this MPI library gives only ",
                   name_of(level), "; calls from a thread need MPI_THREAD_SERIALIZED");
  return true;
}

void end_library() {
  if (library_usable()) MPI_Finalize();
}

}  // namespace comm_core::mpi
