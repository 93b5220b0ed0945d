//! How often each unit was taken into use since the start.
//!
//! What is read of a unit beside the pool's thread is known by this number too, so that bytes of a
//! former use are never taken for those of the present one.

use std::collections::BTreeMap;

/// Units whose numbers lie together.
const PAGE_UNITS: u32 = 256;

/// Numbers of use by unit. Units that were not taken into use since the start take no memory.
#[derive(Default)]
pub struct Uses {
    pages: BTreeMap<u32, Box<[u32; PAGE_UNITS as usize]>>,
}

impl Uses {
    /// These units are taken into use.
    pub fn begin(&mut self, unit: u32, units: u32) {
        for unit in unit..unit.saturating_add(units) {
            let page = self.pages.entry(unit / PAGE_UNITS);
            let page = page.or_insert_with(|| Box::new([0; PAGE_UNITS as usize]));
            let number = &mut page[(unit % PAGE_UNITS) as usize];
            *number = number.wrapping_add(1);
        }
    }

    pub fn number(&self, unit: u32) -> u32 {
        let page = self.pages.get(&(unit / PAGE_UNITS));
        page.map_or(0, |page| page[(unit % PAGE_UNITS) as usize])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_unit_counts_how_often_it_was_taken_into_use() {
        let mut uses = Uses::default();
        uses.begin(250, 8);
        uses.begin(257, 1);
        let numbers = [249, 250, 256, 257, 258].map(|unit| uses.number(unit));
        assert_eq!(numbers, [0, 1, 1, 2, 0]);
    }
}
