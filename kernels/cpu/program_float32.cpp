// The forward pass with weights in float32.

#include "program.h"

EXPORT_PROGRAM(float32, float)
