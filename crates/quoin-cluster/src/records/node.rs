//! The records of nodes.

use core::net::{IpAddr, SocketAddr};
use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::records::{Concerned, Record};

#[derive(Clone, Default, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct NodeRecord {
    pub name: String,
    pub address: String,
    pub topology: BTreeMap<String, String>,
    /// 0: no limit.
    pub volumes_max: u32,
    pub version: String,
    /// Addresses of its host, as its target reported them; none are known from before that.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub host_addresses: BTreeSet<IpAddr>,
}

impl NodeRecord {
    /// All addresses from which its connections may come, as far as they are known.
    pub fn addresses(&self) -> impl Iterator<Item = IpAddr> + '_ {
        let with_port = self.address.parse().map(|address: SocketAddr| address.ip());
        let address = self.address.parse().or(with_port);
        self.host_addresses.iter().copied().chain(address.ok())
    }
}

impl Record for NodeRecord {
    type Index = ();
    const PREFIX: &'static str = "node/";
    fn name(&self) -> String {
        self.name.clone()
    }
    fn concerned(&self) -> Concerned {
        Concerned::Status
    }
}
