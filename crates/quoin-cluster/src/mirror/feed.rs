//! Which slots a lent target of a copy takes: those of the one transfer that its own controller ordered, in
//! their order, each under its sum.

use quoin_types::mutant;

use super::record::Transfer;

/// Slots as they come over the link, without their bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Slot {
    pub transfer: Transfer,
    /// Given by the receiver's controller.
    pub token: u128,
    /// Number of the stream, the later one higher, and the place where it began.
    pub stream: u64,
    pub from: u64,
    /// Block at which they begin, and number of blocks up to the next slots, at least 1.
    pub place: u64,
    pub span: u64,
    /// Sum that came with the bytes, and sum of the bytes that came.
    pub sums: [u32; 2],
    /// The end of the transfer, with a digest over everything that the stream sent.
    pub end: Option<u64>,
}

/// The reason that ends a stream.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Refused {
    #[error("no transfer is ordered with this token")]
    NotOrdered,
    #[error("slots are missing, or come again")]
    OutOfOrder,
    #[error("the bytes of a slot are not those that were sent")]
    WrongSum,
    #[error("the digest over all slots is another one")]
    WrongDigest,
}

/// The order of a lent target, and how far it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Feed {
    order: Option<(Transfer, u128)>,
    stream: u64,
    next: u64,
    /// Nothing before it is missing. A stream that follows another one may begin before it, and has slots again.
    taken_to: u64,
    digest: u64,
    is_fed: bool,
}

impl Feed {
    /// Begins a transfer where its cursor is.
    pub fn order(&mut self, transfer: Transfer, token: u128, from: u64) {
        if self.order != Some((transfer, token)) {
            *self = Self {
                order: Some((transfer, token)),
                next: from,
                taken_to: from,
                ..Self::default()
            };
        }
    }

    /// Nothing is taken any more.
    pub fn stop(&mut self) {
        if !mutant::is("fed-under-an-old-epoch") {
            *self = Self::default();
        }
    }

    pub fn ordered(&self) -> Option<(Transfer, u128)> {
        self.order
    }

    pub fn taken_to(&self) -> u64 {
        self.taken_to
    }

    pub fn is_fed(&self) -> bool {
        self.is_fed
    }

    /// Adds a sum to the digest of a stream; both ends do the same.
    pub fn digest(digest: u64, sum: u32) -> u64 {
        digest.rotate_left(7).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ u64::from(sum)
    }

    /// Returns the place of the slot where it is to be written.
    pub fn take(&mut self, slot: &Slot) -> Result<u64, Refused> {
        let is_token = mutant::is("stream-without-a-token")
            || self.order.is_some_and(|(_, token)| token == slot.token);
        let is_ordered = self.order.is_some_and(|(transfer, _)| transfer == slot.transfer);
        if !(is_token && is_ordered || mutant::is("fed-without-an-order")) {
            return Err(Refused::NotOrdered);
        }
        // A stream that goes on for one that broke begins where nothing is missing, with a digest of its own.
        let is_next =
            slot.stream > self.stream && slot.place == slot.from && slot.from <= self.taken_to;
        if is_next && !self.is_fed {
            (self.stream, self.next, self.digest) = (slot.stream, slot.from, 0);
        }
        let next = slot.place.checked_add(slot.span).filter(|next| *next > slot.place);
        let Some(next) = next else { return Err(Refused::OutOfOrder) };
        if self.is_fed || slot.stream != self.stream || slot.place != self.next {
            return Err(Refused::OutOfOrder);
        }
        let [sent, came] = slot.sums;
        if sent != came && !mutant::is("sum-not-checked-when-fed") {
            return Err(Refused::WrongSum);
        }
        let digest = Self::digest(self.digest, sent);
        if slot.end.is_some_and(|end| end != digest) {
            return Err(Refused::WrongDigest);
        }
        self.digest = digest;
        self.next = next;
        let is_back = mutant::is("slots-taken-back-by-a-stream");
        self.taken_to = if is_back { self.next } else { self.taken_to.max(self.next) };
        self.is_fed = slot.end.is_some();
        Ok(slot.place)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::break_a_rule;
    use quoin_types::ids::PointId;

    const TRANSFER: Transfer = Transfer { point: PointId(2), base: Some(PointId(1)) };

    fn slot(place: u64) -> Slot {
        Slot {
            transfer: TRANSFER,
            token: 9,
            stream: 1,
            from: 3,
            place,
            span: 1,
            sums: [5, 5],
            end: None,
        }
    }

    #[test]
    fn a_stream_that_follows_another_one_begins_where_nothing_is_missing() {
        let mut feed = Feed::default();
        feed.order(TRANSFER, 9, 3);
        assert_eq!(feed.take(&slot(3)), Ok(3));
        let second = |from, place| Slot { stream: 2, from, ..slot(place) };
        assert_eq!(feed.take(&second(5, 5)), Err(Refused::OutOfOrder));
        assert_eq!(feed.take(&second(3, 3)), Ok(3));
        assert_eq!(feed.take(&slot(4)), Err(Refused::OutOfOrder));
        let digest = Feed::digest(Feed::digest(0, 5), 5);
        assert_eq!(feed.take(&Slot { end: Some(digest), ..second(3, 4) }), Ok(4));
    }

    #[test]
    fn slots_follow_by_the_blocks_that_they_cover_and_cover_some() {
        let mut feed = Feed::default();
        feed.order(TRANSFER, 9, 3);
        assert_eq!(feed.take(&Slot { span: 0, ..slot(3) }), Err(Refused::OutOfOrder));
        assert_eq!(feed.take(&Slot { span: u64::MAX, ..slot(3) }), Err(Refused::OutOfOrder));
        assert_eq!(feed.take(&Slot { span: 7, ..slot(3) }), Ok(3));
        assert_eq!((feed.taken_to(), feed.take(&slot(4))), (10, Err(Refused::OutOfOrder)));
        let digest = Feed::digest(Feed::digest(0, 5), 5);
        assert_eq!(feed.take(&Slot { end: Some(digest), ..slot(10) }), Ok(10));
        assert!(feed.is_fed());
    }

    #[test]
    fn a_stream_that_has_slots_again_takes_nothing_back() {
        break_a_rule();
        let mut feed = Feed::default();
        feed.order(TRANSFER, 9, 3);
        (3..6).for_each(|place| assert_eq!(feed.take(&slot(place)), Ok(place)));
        let later = |stream, from, place| Slot { stream, from, ..slot(place) };
        assert_eq!(feed.take(&later(2, 4, 4)), Ok(4));
        assert_eq!(feed.taken_to(), 6);
        assert_eq!(feed.take(&later(3, 6, 6)), Ok(6));
    }

    #[test]
    fn only_the_slots_of_the_ordered_transfer_are_taken_and_each_once() {
        break_a_rule();
        let mut feed = Feed::default();
        assert_eq!(feed.take(&slot(0)), Err(Refused::NotOrdered));
        feed.order(TRANSFER, 9, 3);
        assert_eq!(feed.take(&slot(2)), Err(Refused::OutOfOrder));
        assert_eq!(feed.take(&Slot { token: 8, ..slot(3) }), Err(Refused::NotOrdered));
        let other = Transfer { base: None, ..TRANSFER };
        assert_eq!(feed.take(&Slot { transfer: other, ..slot(3) }), Err(Refused::NotOrdered));
        assert_eq!(feed.take(&Slot { sums: [5, 6], ..slot(3) }), Err(Refused::WrongSum));
        assert_eq!(feed.take(&slot(3)), Ok(3));
        assert_eq!(feed.take(&slot(3)), Err(Refused::OutOfOrder));
        let digest = Feed::digest(Feed::digest(0, 5), 5);
        assert_eq!(feed.take(&Slot { end: Some(1), ..slot(4) }), Err(Refused::WrongDigest));
        assert_eq!(feed.take(&Slot { end: Some(digest), ..slot(4) }), Ok(4));
        assert!(feed.is_fed());
        assert_eq!(feed.take(&slot(5)), Err(Refused::OutOfOrder));
        feed.stop();
        assert_eq!(feed.take(&slot(5)), Err(Refused::NotOrdered));
    }
}
