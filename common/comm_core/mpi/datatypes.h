// MPI's names for torch's element types and reductions.
#pragma once

#include <ATen/core/Tensor.h>
#include <mpi.h>

#include <torch/csrc/distributed/c10d/Types.hpp>

namespace comm_core::mpi {

// Makes the types and reductions that MPI does not have (float16, bfloat16). Call it on the
// progress thread, after MPI_Init, before any `mpi_type`.
void create_types();

// Undoes `create_types`, before MPI_Finalize.
void free_types();

// The MPI type of one element. Throws c10::TypeError if there is none.
MPI_Datatype mpi_type(at::ScalarType type);

// The MPI operation; that of AVG is MPI_SUM, and `divide` follows. The logical operations stand in
// for bool: SUM and MAX are "or", PRODUCT and MIN are "and". Throws c10::TypeError if the element
// type does not have the operation.
MPI_Op mpi_op(const c10d::ReduceOp& op, at::ScalarType type);

// Divides `count` floating-point or complex elements at `data` by `divisor`, in place.
void divide(void* data, int64_t count, at::ScalarType type, int divisor);

}  // namespace comm_core::mpi
