"""The bias as additional columns of a matrix product: append them to the operands, and drop them from a gradient."""
