//! Sizes that a caller requests, and the size that is chosen.

use quoin_api::csi::CapacityRange;
use tonic::Status;

use crate::refusal::{invalid, out_of_range};

/// Size of a volume whose creator gives no size.
pub const DEFAULT_BYTES: u64 = 1 << 30;
/// Granule of sizes: the internal block.
pub const GRANULE_BYTES: u64 = 4096;

/// A valid range: not both zero, not negative, not inverted. A limit of 0 means no limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Range {
    pub required_bytes: u64,
    pub limit_bytes: u64,
}

impl Range {
    /// Reads a range that is present.
    ///
    /// # Errors
    /// 3 for a range without a value or with a negative one, 11 for an empty one.
    pub fn read(given: CapacityRange) -> Result<Self, Status> {
        let number = |field: &str, value: i64| {
            u64::try_from(value).map_err(|_| invalid(field, "is negative"))
        };
        let required_bytes = number("capacity_range.required_bytes", given.required_bytes)?;
        let limit_bytes = number("capacity_range.limit_bytes", given.limit_bytes)?;
        if required_bytes == 0 && limit_bytes == 0 {
            return Err(invalid("capacity_range", "has neither required_bytes nor limit_bytes"));
        }
        if limit_bytes != 0 && required_bytes > limit_bytes {
            return Err(out_of_range(format!(
                "capacity_range: required_bytes ({required_bytes}) is above limit_bytes \
                 ({limit_bytes})"
            )));
        }
        Ok(Self { required_bytes, limit_bytes })
    }

    /// Returns the smallest possible size within the range.
    ///
    /// # Errors
    /// 11 if no multiple of the granule lies in it.
    pub fn rounded(self) -> Result<u64, Status> {
        let size_bytes = self
            .required_bytes
            .checked_next_multiple_of(GRANULE_BYTES)
            .filter(|size| i64::try_from(*size).is_ok())
            .ok_or_else(|| {
                out_of_range(format!(
                    "{} bytes are more than a volume may have",
                    self.required_bytes
                ))
            })?;
        if self.limit_bytes != 0 && size_bytes > self.limit_bytes {
            return Err(out_of_range(format!(
                "sizes are multiples of {GRANULE_BYTES} bytes, and none lies between {} and {}",
                self.required_bytes, self.limit_bytes
            )));
        }
        Ok(size_bytes)
    }

    /// Returns the size of a new volume: as [`Self::rounded`], and where only a limit is given, the
    /// default size or the limit if that is smaller.
    ///
    /// # Errors
    /// As [`Self::rounded`].
    pub fn of_new_volume(given: Option<CapacityRange>) -> Result<(u64, Self), Status> {
        let Some(given) = given else {
            return Ok((DEFAULT_BYTES, Self { required_bytes: 0, limit_bytes: 0 }));
        };
        let range = Self::read(given)?;
        if range.required_bytes != 0 {
            return Ok((range.rounded()?, range));
        }
        let size_bytes = DEFAULT_BYTES.min(range.limit_bytes / GRANULE_BYTES * GRANULE_BYTES);
        if size_bytes == 0 {
            return Err(out_of_range(format!(
                "limit_bytes ({}) is below the smallest size of {GRANULE_BYTES} bytes",
                range.limit_bytes
            )));
        }
        Ok((size_bytes, range))
    }
}

/// Returns a size as the interface's signed number.
pub fn signed(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tonic::Code;

    use super::*;

    fn range(required_bytes: i64, limit_bytes: i64) -> CapacityRange {
        CapacityRange { required_bytes, limit_bytes }
    }
    fn code(required_bytes: i64, limit_bytes: i64) -> Code {
        Range::of_new_volume(Some(range(required_bytes, limit_bytes))).unwrap_err().code()
    }

    /// Proves CSI-CAPACITY-02, CSI-CAPACITY-04, CSI-CAPACITY-06: the rule that all RPCs share.
    #[test]
    fn an_empty_or_negative_range_is_invalid() {
        assert_eq!(code(0, 0), Code::InvalidArgument);
        assert_eq!(code(-1, 0), Code::InvalidArgument);
        assert_eq!(code(1, -1), Code::InvalidArgument);
        assert_eq!(code(i64::MIN, i64::MIN), Code::InvalidArgument);
    }

    #[test]
    fn a_range_without_a_size_in_it_is_out_of_range() {
        assert_eq!(code(4097, 4098), Code::OutOfRange);
        assert_eq!(code(8192, 4096), Code::OutOfRange);
        assert_eq!(code(0, 4095), Code::OutOfRange);
        assert_eq!(code(i64::MAX, 0), Code::OutOfRange);
    }

    /// A volume that is large enough is not resized: its range is read, and no size is made of it.
    #[test]
    fn a_limit_below_what_is_required_is_refused_wherever_a_range_is_read() {
        for (required, limit) in [(4096, 4096), (4096, 4097), (4096, 0), (0, 1)] {
            assert!(Range::read(range(required, limit)).is_ok(), "{required}, {limit}");
        }
        for (required, limit) in [(4096, 4095), (2, 1), (i64::MAX, 1)] {
            let refused = Range::read(range(required, limit)).unwrap_err();
            assert_eq!(refused.code(), Code::OutOfRange, "{required}, {limit}");
        }
    }

    #[test]
    fn without_a_range_or_with_only_a_limit_the_default_size_is_used() {
        assert_eq!(Range::of_new_volume(None).unwrap().0, DEFAULT_BYTES);
        assert_eq!(Range::of_new_volume(Some(range(0, i64::MAX))).unwrap().0, DEFAULT_BYTES);
        assert_eq!(Range::of_new_volume(Some(range(0, 10_000))).unwrap().0, 8192);
    }

    #[test]
    fn sizes_are_taken_at_the_edges_of_their_granule_and_of_their_range() {
        let most = i64::MAX - i64::MAX % 4096;
        for (required, limit, size) in [
            (1, 0, Some(4096)),
            (4095, 0, Some(4096)),
            (4096, 0, Some(4096)),
            (4097, 0, Some(8192)),
            (4096, 4096, Some(4096)),
            (4095, 4095, None),
            (4095, 4096, Some(4096)),
            (4097, 8191, None),
            (4097, 8192, Some(8192)),
            (4097, 4096, None),
            (0, 4096, Some(4096)),
            (0, 4097, Some(4096)),
            (0, 8191, Some(4096)),
            (0, 1 << 30, Some(1 << 30)),
            (0, (1 << 30) - 1, Some((1 << 30) - 4096)),
            (0, (1 << 30) + 4096, Some(1 << 30)),
            (most - 1, 0, Some(most as u64)),
            (most, 0, Some(most as u64)),
            (most + 1, 0, None),
        ] {
            let found = Range::of_new_volume(Some(range(required, limit)));
            if let Err(status) = &found {
                assert_eq!(status.code(), Code::OutOfRange, "{required} to {limit}");
            }
            assert_eq!(found.ok().map(|(size, _)| size), size, "{required} to {limit}");
        }
        assert_eq!(signed(i64::MAX as u64), i64::MAX);
        assert_eq!((signed(1 << 63), signed(u64::MAX), signed(0)), (i64::MAX, i64::MAX, 0));
    }

    proptest! {
        /// Proves CSI-CAPACITY-01, CSI-CAPACITY-03, CSI-CAPACITY-05: for the chosen size.
        #[test]
        fn a_chosen_size_lies_in_the_range(required in 0_i64.., extra in 0_i64..1 << 40, exact: bool) {
            let limit = if exact { required } else { required.saturating_add(extra) };
            if let Ok((size, _)) = Range::of_new_volume(Some(range(required, limit))) {
                prop_assert!(size >= required.unsigned_abs());
                prop_assert!(limit == 0 || size <= limit.unsigned_abs());
                prop_assert_eq!(size % GRANULE_BYTES, 0);
            }
        }
    }
}
