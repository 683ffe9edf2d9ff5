// The forward pass with weights in bfloat16.

#include "program.h"

EXPORT_PROGRAM(bfloat16, bf16)
