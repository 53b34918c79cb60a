"""The record of a run and its audit: the formats that each GEMM and tensor really had, compared with the plan."""
