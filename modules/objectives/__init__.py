"""One objective a file: a pure function on tensors and a thin head around it."""
