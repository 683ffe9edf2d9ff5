#include "program.h"

EXPORT_PROGRAM(bfloat16, bf16)
