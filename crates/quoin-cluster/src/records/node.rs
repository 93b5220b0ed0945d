//! The records of nodes.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::records::{Concerned, Record};

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct NodeRecord {
    pub name: String,
    pub address: String,
    pub topology: BTreeMap<String, String>,
    /// 0: no limit.
    pub volumes_max: u32,
    pub version: String,
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
