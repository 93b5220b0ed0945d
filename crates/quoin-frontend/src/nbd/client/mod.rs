//! NBD clients.
