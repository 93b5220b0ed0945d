//! Tests of real processes: everything that a user starts, run as by a user.
//!
//! They are one program, so that all of them wait at the same time, and not one file after the
//! other. Shared parts are in `common` (clusters and networks), `support` (faults of pools) and
//! `machines` (hosts with a service manager).

mod common;
mod machines;
mod support;

mod across_hosts;
mod bad_days;
mod balance;
mod block_devices;
mod certificates;
mod clones;
mod command_line;
mod controllers;
mod crashes;
mod csi;
mod damage;
mod days;
mod demo;
mod dev;
mod differing;
mod disaster_recovery;
mod encryption;
mod failing_disks;
mod fences;
mod figures;
mod floods;
mod full;
mod group_snapshots;
mod handover;
mod heal;
mod health;
mod hosts;
mod housekeeping;
mod known_list;
mod kubectl;
mod kubernetes;
mod limits;
mod listeners;
mod lost_records;
mod members;
mod mirrors;
mod modifying;
mod namespaces;
mod nbd_tcp;
mod node_healing;
mod nodes;
mod orchestrators;
mod orchestrators_in_trouble;
mod package;
mod pages;
mod peers;
mod pressure;
mod rebuilding;
mod replicas;
mod returned_host;
mod rolled_back;
mod scaling;
mod services_runbook;
mod shards;
mod sharing;
mod shutdown;
mod slow_replica;
mod snapshot_contents;
mod snapshots;
mod stores;
mod support_bundle;
mod terms;
mod unexpected_peers;
mod unprivileged;
mod verify;
