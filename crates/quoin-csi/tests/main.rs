//! The CSI services over a control plane and devices of the tests. One program, so that it is
//! linked once.

mod addons;
mod addons_cluster;
mod clones;
mod common;

mod controller;
mod documents;
mod encryption;
mod errors;
mod groups;
mod healer;
mod health;
mod interrupted;
mod metadata;
mod modify;
mod node;
mod process;
mod reclaim_node;
mod replication;
mod services;
mod snapshots;
mod topology;
mod volume_groups;
