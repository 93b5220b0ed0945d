//! The simulator over bounded numbers of seeds. One program, so that it is linked once.

mod mutants;
mod scaleup;
mod seeds;
