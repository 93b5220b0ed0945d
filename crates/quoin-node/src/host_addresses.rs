//! Addresses of this host.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Most addresses that are told of one host.
const ADDRESSES_MAX: usize = 256;

/// Returns the addresses of the interfaces that are up, in their order: those from which connections to
/// other hosts may come. Loopback addresses are of no other host's interest, and those of one link alone
/// name a host on that link only.
pub fn host_addresses() -> Vec<String> {
    let mut list: *mut libc::ifaddrs = std::ptr::null_mut();
    // SAFETY: the pointer is of a live variable, which is written on success alone.
    if unsafe { libc::getifaddrs(&raw mut list) } != 0 {
        return Vec::new();
    }
    let (mut addresses, mut next) = (BTreeSet::new(), list);
    while !next.is_null() {
        // SAFETY: the list is linked by valid pointers until it is freed below.
        let entry = unsafe { &*next };
        if entry.ifa_flags & libc::IFF_UP as libc::c_uint != 0 {
            // SAFETY: the address of an entry of the list, which lives as long as that.
            addresses.extend(unsafe { address(entry.ifa_addr) }.filter(|ip| is_told(*ip)));
        }
        next = entry.ifa_next;
    }
    // SAFETY: it came from `getifaddrs`, and nothing of it is kept.
    unsafe { libc::freeifaddrs(list) };
    addresses.iter().take(ADDRESSES_MAX).map(IpAddr::to_string).collect()
}

/// # Safety
/// The pointer is null or of a socket address of the family that it names.
unsafe fn address(of: *const libc::sockaddr) -> Option<IpAddr> {
    if of.is_null() {
        return None;
    }
    // SAFETY: every socket address begins with its family.
    match i32::from(unsafe { (*of).sa_family }) {
        libc::AF_INET => {
            // SAFETY: the family says that it is one of IPv4.
            let of = unsafe { &*of.cast::<libc::sockaddr_in>() };
            Some(Ipv4Addr::from_bits(u32::from_be(of.sin_addr.s_addr)).into())
        }
        libc::AF_INET6 => {
            // SAFETY: the family says that it is one of IPv6.
            let of = unsafe { &*of.cast::<libc::sockaddr_in6>() };
            Some(Ipv6Addr::from(of.sin6_addr.s6_addr).into())
        }
        _ => None,
    }
}

fn is_told(address: IpAddr) -> bool {
    let is_of_one_link = match address {
        IpAddr::V4(_) => false,
        IpAddr::V6(address) => address.is_unicast_link_local(),
    };
    !address.is_loopback() && !address.is_unspecified() && !is_of_one_link
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_addresses_of_this_host_are_those_to_which_a_socket_can_be_bound_without_loopback() {
        let all = host_addresses();
        for text in &all {
            let address: IpAddr = text.parse().unwrap();
            assert!(is_told(address), "{address}");
            std::net::UdpSocket::bind((address, 0)).unwrap();
        }
        // The one by which other networks are reached is among them, where there is a way out.
        let socket = std::net::UdpSocket::bind("0.0.0.0:0").unwrap();
        if socket.connect("192.0.2.77:9").is_ok() {
            let source = socket.local_addr().unwrap().ip();
            assert!(source.is_loopback() || all.contains(&source.to_string()), "{source} {all:?}");
        }
        for (address, told) in
            [("127.0.0.1", false), ("::1", false), ("fe80::1", false), ("fd00::2", true)]
        {
            assert_eq!(is_told(address.parse().unwrap()), told, "{address}");
        }
    }
}
