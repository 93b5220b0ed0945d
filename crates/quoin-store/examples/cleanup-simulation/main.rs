//! Cost of clean-up, simulated: blocks written for each block that clients overwrite. Prints the
//! tables that stand in `docs/store.md`.
//!
//! `cargo run --release -p quoin-store --example cleanup-simulation [placement | snapshots | clones]`
//!
//! Only placement is modelled: streams of segments, log segments that cannot be cleaned before a
//! checkpoint, map nodes written at checkpoints, and space that is free only afterwards.

mod placement;
mod views;

use views::{Naming, Pool, Sharing};

/// 1 GiB: the costs are ratios, and follow the number of blocks of a leaf that change between
/// two views, not the size.
const VOLUME_BLOCKS: u32 = 1 << 18;
const FILL_PERCENT: u32 = 80;

fn namings() -> [(&'static str, Naming); 4] {
    [
        ("addresses in leaves", Naming::Address),
        ("logical segments", Naming::Logical { renamed_below: 0 }),
        ("renamed below 1/16", Naming::Logical { renamed_below: 64 }),
        ("renamed below 1/4", Naming::Logical { renamed_below: 256 }),
    ]
}

fn print(case: &str, sharing: Sharing) {
    print!("| {case} ");
    for (_, naming) in namings() {
        let written = Pool::new(VOLUME_BLOCKS, FILL_PERCENT, sharing, naming).measure();
        let moved = written.moved as f64 / written.clients as f64;
        let map = written.map_bytes as f64 / 4096.0 / written.clients as f64;
        let table = written.table_bytes as f64 / 4096.0 / written.clients as f64;
        print!(
            "| {:.2} ({moved:.2} moved, {map:.2} map, {table:.3} table; {:.1} names a segment) ",
            written.amplification(),
            written.entries_per_segment
        );
    }
    println!("|");
}

fn header(first: &str) {
    let names: Vec<&str> = namings().iter().map(|(name, _)| *name).collect();
    println!("\n| {first} | {} |\n|---|---|---|---|---|", names.join(" | "));
}

fn snapshots() {
    header("rotating snapshots, changed between two");
    print("none", Sharing::Snapshots { kept: 0, changed_permille: 10 });
    for (kept, changed_permille) in [(10, 10), (100, 1), (100, 10), (1000, 1), (1000, 10)] {
        let percent = f64::from(changed_permille) / 10.0;
        print(&format!("{kept}, {percent} %"), Sharing::Snapshots { kept, changed_permille });
    }
}

fn clones() {
    header("clones of one image, overwritten by each");
    for (count, changed_permille) in [(10, 10), (100, 10), (100, 50)] {
        let percent = f64::from(changed_permille) / 10.0;
        print(&format!("{count}, {percent} %"), Sharing::Clones { count, changed_permille });
    }
}

fn main() {
    let wanted = std::env::args().nth(1);
    let wants = |name: &str| wanted.as_deref().is_none_or(|wanted| wanted == name);
    if wants("placement") {
        placement::print();
    }
    if wants("snapshots") {
        snapshots();
    }
    if wants("clones") {
        clones();
    }
}
