//! The store on simulated disks and real files. One program, so that it is linked once.

mod common;

mod clones;
mod crash_enumeration;
mod damage;
mod device;
mod family_crashes;
mod fetching;
mod formats;
mod increments;
mod model;
mod offline;
mod opening;
mod pressure;
mod reverts;
mod ring;
mod shares;
mod steps;
mod views;
