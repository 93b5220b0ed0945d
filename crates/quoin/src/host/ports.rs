//! Listeners on ports of this host, as far as this process may know.

use std::fs;
use std::net::SocketAddr;

const LISTENING: &str = "0A";

/// Listener as in `nginx (process 7)`; `None` where there is none, or it cannot be known.
pub fn listener(address: SocketAddr) -> Option<String> {
    let tables = ["/proc/net/tcp", "/proc/net/tcp6"].map(fs::read_to_string);
    let inode = tables.iter().flatten().find_map(|table| inode_of(table, address.port()))?;
    let socket = format!("socket:[{inode}]");
    for process in fs::read_dir("/proc").ok()?.flatten() {
        // `self` is there too.
        if !process.file_name().as_encoded_bytes().iter().all(u8::is_ascii_digit) {
            continue;
        }
        let open = fs::read_dir(process.path().join("fd")).into_iter().flatten().flatten();
        let mut links = open.filter_map(|entry| fs::read_link(entry.path()).ok());
        if links.any(|link| link.as_os_str() == socket.as_str()) {
            let name = fs::read_to_string(process.path().join("comm")).unwrap_or_default();
            let pid = process.file_name().to_string_lossy().into_owned();
            return Some(format!("{} (process {pid})", name.trim()));
        }
    }
    None
}

/// The socket that listens on the port, on whatever address.
fn inode_of(table: &str, port: u16) -> Option<u64> {
    let port = format!(":{port:04X}");
    table.lines().skip(1).find_map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let listens = words.get(1)?.ends_with(&port) && *words.get(3)? == LISTENING;
        listens.then(|| words.get(9)?.parse().ok()).flatten()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_listens_on_a_port_is_found_by_name_and_pid() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let found = super::listener(address).unwrap();
        assert!(found.contains(&format!("(process {})", std::process::id())), "{found}");
        drop(listener);
        assert_eq!(super::listener(address), None);
        assert_eq!(inode_of("head\n 0: 0100007F:1F40 x 0A\n garbage", 8000), None);
    }
}
