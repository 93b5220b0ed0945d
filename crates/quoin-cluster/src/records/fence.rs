//! Fences of blocks of network addresses.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use quoin_types::VolumeId;
use serde::{Deserialize, Serialize};

use crate::records::{Concerned, NodeRecord, Record, Text};

/// Addresses that begin with the same bits, as ADDRESS/LENGTH.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Block {
    /// The first of them.
    address: IpAddr,
    length: u8,
}

/// Text that names no block.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "not an address with the length of its prefix: 192.0.2.7/32 or 2001:db8::7/128 is one address, \
     192.0.2.0/24 all that begin alike"
)]
pub struct NoBlock;

/// Length of a prefix that maps IPv4 into IPv6.
const MAPPED_BITS: u8 = 96;

fn first_of(address: IpAddr, length: u8) -> IpAddr {
    match address {
        IpAddr::V4(address) => {
            let mask = u32::MAX.checked_shl(32 - u32::from(length)).unwrap_or(0);
            Ipv4Addr::from_bits(address.to_bits() & mask).into()
        }
        IpAddr::V6(address) => {
            let mask = u128::MAX.checked_shl(128 - u32::from(length)).unwrap_or(0);
            Ipv6Addr::from_bits(address.to_bits() & mask).into()
        }
    }
}

impl Block {
    /// The block of one address.
    pub fn of(address: IpAddr) -> Self {
        let address = address.to_canonical();
        Self { address, length: if address.is_ipv4() { 32 } else { 128 } }
    }

    pub fn covers(&self, address: IpAddr) -> bool {
        let address = address.to_canonical();
        address.is_ipv4() == self.address.is_ipv4()
            && first_of(address, self.length) == self.address
    }
}

impl FromStr for Block {
    type Err = NoBlock;

    fn from_str(text: &str) -> Result<Self, NoBlock> {
        let (address, length) = text.split_once('/').ok_or(NoBlock)?;
        let address: IpAddr = address.parse().map_err(|_| NoBlock)?;
        let is_number = !length.is_empty() && length.bytes().all(|b| b.is_ascii_digit());
        let length: u8 = length.parse().ok().filter(|_| is_number).ok_or(NoBlock)?;
        let bits = if address.is_ipv4() { 32 } else { 128 };
        if length > bits {
            return Err(NoBlock);
        }
        let (address, length) = match address.to_canonical() {
            mapped if mapped.is_ipv4() && address.is_ipv6() && length >= MAPPED_BITS => {
                (mapped, length - MAPPED_BITS)
            }
            _ => (address, length),
        };
        Ok(Self { address: first_of(address, length), length })
    }
}

impl fmt::Display for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.length)
    }
}

/// Fence of one block.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct FenceRecord {
    pub block: Text<Block>,
    pub since_ms: u64,
    /// Nodes that had an address in it since: one that takes another address stays fenced.
    pub nodes: BTreeSet<String>,
    /// Volumes that these nodes may have written when they were fenced.
    pub volumes: BTreeSet<Text<VolumeId>>,
}

impl FenceRecord {
    /// Returns true if an address of the node is in the block.
    pub fn has_address_of(&self, node: &NodeRecord) -> bool {
        node.addresses().any(|address| self.block.0.covers(address))
    }

    pub fn covers(&self, node: &NodeRecord) -> bool {
        self.nodes.contains(&node.name) || self.has_address_of(node)
    }
}

impl Record for FenceRecord {
    type Index = ();
    const PREFIX: &'static str = "fence/";
    fn name(&self) -> String {
        self.block.0.to_string()
    }
    fn concerned(&self) -> Concerned {
        Concerned::all_nodes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(text: &str) -> Block {
        text.parse().unwrap()
    }

    #[test]
    fn a_block_is_an_address_with_the_length_of_its_prefix_and_nothing_else_is() {
        for (text, canonical) in [
            ("192.0.2.7/32", "192.0.2.7/32"),
            ("192.0.2.7/24", "192.0.2.0/24"),
            ("0.0.0.0/0", "0.0.0.0/0"),
            ("2001:DB8::7/128", "2001:db8::7/128"),
            ("2001:db8::7/64", "2001:db8::/64"),
            ("::/0", "::/0"),
            ("::ffff:192.0.2.7/128", "192.0.2.7/32"),
        ] {
            assert_eq!(block(text).to_string(), canonical);
            assert_eq!(block(canonical), block(text));
        }
        for text in [
            "",
            "/",
            "192.0.2.7",
            "192.0.2.7/",
            "192.0.2.7/33",
            "192.0.2.7/-1",
            "192.0.2.7/+8",
            "192.0.2/24",
            "192.0.2.7/24/24",
            " 192.0.2.7/24",
            "h1/32",
            "2001:db8::/129",
            "2001:db8::g/64",
            "192.0.2.7/256",
            "192.0.2.7/٣",
        ] {
            assert_eq!(text.parse::<Block>(), Err(NoBlock), "{text:?}");
        }
    }

    #[test]
    fn a_block_covers_the_addresses_that_begin_with_its_bits_whatever_way_they_are_written() {
        let covers = |text: &str, address: &str| block(text).covers(address.parse().unwrap());
        assert!(covers("192.0.2.0/24", "192.0.2.255") && !covers("192.0.2.0/24", "192.0.3.0"));
        assert!(covers("192.0.2.7/32", "::ffff:192.0.2.7"), "a socket of both kinds says it so");
        assert!(!covers("::/0", "192.0.2.7") && !covers("0.0.0.0/0", "2001:db8::1"));
        assert!(covers("2001:db8::/33", "2001:db8:7fff::1"));
        assert!(!covers("2001:db8::/33", "2001:db8:8000::1"));
        assert!(covers("0.0.0.0/0", "255.255.255.255") && covers("::/0", "ffff::1"));
        assert!(Block::of("::ffff:192.0.2.7".parse().unwrap()) == block("192.0.2.7/32"));
    }
}
