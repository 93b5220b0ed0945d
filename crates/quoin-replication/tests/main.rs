//! Tests of the protocol with one target and its replicas. They are one program, so that it is
//! linked once.

mod broken;
mod common;
mod hand;
mod one_replica;

mod apart;
mod bounds;
mod bulk;
mod clients;
mod clones;
mod codec;
mod copying;
mod edges;
mod fence;
mod full_pools;
mod holds;
mod hostile;
mod increments;
mod late_answers;
mod membership;
mod moments;
mod options;
mod owed;
mod parked;
mod rebuilds;
mod reduced;
mod refused;
mod refused_reads;
mod replica;
mod resumed;
mod room;
mod snapshots;
mod taking_back;
mod two_histories;
mod verify;
mod volume;
mod withdrawn;
