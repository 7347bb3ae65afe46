// What all kernels include and what does not depend on their macros, compiled once for all of them
// (tests/support/emulated_gpu.py): most of the time that a kernel takes to compile.
#pragma once

#include "tests/emulation/cuda.h"

#include "kernels/abi/handle.h"
#include "kernels/abi/params.h"
#include "kernels/abi/signal.h"
#include "kernels/device/ptx.cuh"
