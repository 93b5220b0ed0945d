//! The interfaces between the processes of a cluster. One program, so that it is linked once.

mod editions;
mod formats;
mod redacted;
