// All bindings in one unit, because torch's headers take most of the time.
#include "bindings.cpp"
#include "blas.cpp"
#include "ce.cpp"
