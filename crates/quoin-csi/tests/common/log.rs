//! The log of a test, which is read at its end.

use std::io::Write;
use std::sync::{Arc, Mutex};

/// Collects the log.
#[derive(Clone, Default)]
pub struct Log(pub Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Keeps a second subscriber beside that of a test. With one alone, a line that another thread comes to first is
/// switched off for all of them.
pub fn keep_lines() {
    static BESIDE: std::sync::OnceLock<tracing::Dispatch> = std::sync::OnceLock::new();
    BESIDE.get_or_init(|| {
        let lines = tracing_subscriber::fmt().with_max_level(tracing::Level::TRACE);
        tracing::Dispatch::new(lines.with_writer(std::io::sink).finish())
    });
}
