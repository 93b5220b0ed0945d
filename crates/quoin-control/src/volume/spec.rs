//! Specification of a volume: every field checked, every default filled in, each refusal naming the
//! field and the rule.

use quoin_api::control::{self as api, VolumeSpec};
use quoin_api::volume::{BlockSize, FileSystem, VolumeOptions};
use quoin_cluster::records::Spec;
use quoin_encryption::Encryption;
use quoin_types::membership::default_cf;
use quoin_types::{BLOCK_SIZE, VOLUME_BLOCKS_MAX};

use crate::Error;
pub use crate::settings::Defaults;
use crate::text;
use crate::volume::topology;

/// Smallest volume: file systems do not fit in less.
pub const SIZE_BYTES_MIN: u64 = 1 << 20;
/// Largest volume.
pub const SIZE_BYTES_MAX: u64 = VOLUME_BLOCKS_MAX * BLOCK_SIZE as u64;
/// Most replicas of one volume, unless the controller is told otherwise.
pub const REPLICAS_MAX: u32 = 5;
/// Most replicas of a volume: while a membership changes, the old replicas and the new ones stand in one
/// list, and a list of the protocol has twice as many.
pub const REPLICAS_HARD_MAX: u32 = quoin_types::membership::REPLICAS_MAX as u32 / 2;
/// Longest name of a volume, in bytes.
pub const NAME_BYTES_MAX: usize = 128;
const MAP_BYTES_MAX: usize = 4096;

/// Names are what orchestrators make them: up to 128 bytes of any characters but those that
/// CSI bans, which are the control characters other than tab, line feed and carriage return.
/// (Names are compared byte for byte; a volume is told apart by its id.)
pub fn check_name(name: &str) -> Result<(), Error> {
    if name.is_empty() {
        return Err(Error::invalid("name", "a volume needs one"));
    }
    if name.len() > NAME_BYTES_MAX {
        return Err(Error::invalid(
            "name",
            format!("it has {} bytes, at most {NAME_BYTES_MAX} are allowed", name.len()),
        ));
    }
    if let Some(bad) = name.chars().find(|c| c.is_control() && !"\t\n\r".contains(*c)) {
        let code = u32::from(bad);
        return Err(Error::invalid("name", format!("control character U+{code:04X} in it")));
    }
    Ok(())
}

/// Refuses more replicas than `most`.
pub fn check_replicas(field: &'static str, replicas: u32, most: u32) -> Result<(), Error> {
    if replicas <= most {
        return Ok(());
    }
    let way = match most < REPLICAS_HARD_MAX {
        true => format!(" (`quoin controller run --max-replicas` allows {REPLICAS_HARD_MAX})"),
        false => String::new(),
    };
    let rule = format!("{replicas} is too many, a volume has at most {most}{way}");
    Err(Error::invalid(field, rule))
}

/// Completes a spec. The size is not part of it: see [`size`].
pub fn complete(asked: &VolumeSpec, defaults: Defaults) -> Result<Spec, Error> {
    check_name(&asked.name)?;
    let replicas = if asked.replicas == 0 { defaults.replicas.into() } else { asked.replicas };
    check_replicas("replicas", replicas, REPLICAS_HARD_MAX)?;
    let replicas = replicas as u8;
    let majority = default_cf(replicas);
    let factor = match asked.consistency_factor {
        0 => majority,
        n if n > u32::from(replicas) => {
            let rule = format!("{n} is more than the {replicas} replicas (1 to replicas)");
            return Err(Error::invalid("consistencyFactor", rule));
        }
        n => n as u8,
    };
    if factor < majority && !asked.allow_loss_on_single_failure {
        let rule = format!(
            "{factor} of {replicas} is below a majority ({majority}): acknowledged data can be \
             lost with {factor} of them, and the volume restarts only with all of them; \
             accept that with allowLossOnSingleFailure"
        );
        return Err(Error::invalid("consistencyFactor", rule));
    }
    let accessible_topology = topology::read("accessibleTopology", &asked.accessible_topology)?;
    let maps = [
        ("parameters", &asked.parameters),
        ("mutableParameters", &asked.mutable_parameters),
        ("claim", &asked.claim),
    ];
    for (field, map) in maps {
        let bytes: usize = map.iter().map(|(key, value)| key.len() + value.len()).sum();
        if bytes > MAP_BYTES_MAX {
            return Err(Error::invalid(field, format!("more than {MAP_BYTES_MAX} bytes")));
        }
    }
    let options = VolumeOptions::complete(asked, defaults.spread);
    let options = options.map_err(|wrong| Error::invalid(wrong.key, wrong.rule))?;
    Ok(Spec {
        options,
        allow_loss_on_single_failure: asked.allow_loss_on_single_failure,
        parameters: asked.parameters.clone().into_iter().collect(),
        accessible_topology,
        mutable_parameters: asked.mutable_parameters.clone().into_iter().collect(),
        claim: asked.claim.clone().into_iter().collect(),
        encryption: encryption(asked)?,
        ..Spec::plain(&asked.name, replicas, factor)
    })
}

/// Encryption is of whole blocks of 4 KiB, so a volume of smaller ones cannot have it.
fn encryption(asked: &VolumeSpec) -> Result<Option<Encryption>, Error> {
    let Some(given) = &asked.encryption else { return Ok(None) };
    let given = Encryption::try_from(given);
    let given = given.map_err(|rule| Error::invalid("encryption", rule.to_string()))?;
    if asked.block_size == BlockSize::Bytes512.bytes() {
        let rule = "512 bytes are too small for an encrypted volume, whose blocks have 4096";
        return Err(Error::invalid("blockSize", rule));
    }
    Ok(Some(given))
}

/// The size to provision: `asked_bytes` rounded up to whole blocks, within `limit_bytes` (0: none).
pub fn size(asked_bytes: u64, limit_bytes: u64) -> Result<u64, Error> {
    if asked_bytes == 0 {
        return Err(Error::invalid("size", "0 bytes are no volume"));
    }
    if asked_bytes > SIZE_BYTES_MAX {
        let rule =
            format!("{asked_bytes} bytes are more than a volume can have ({SIZE_BYTES_MAX})");
        return Err(Error::OutOfRange(format!("size: {rule}")));
    }
    if limit_bytes != 0 && limit_bytes < asked_bytes {
        let rule = format!("the limit of {limit_bytes} bytes is below the size of {asked_bytes}");
        return Err(Error::invalid("limit", rule));
    }
    let size = asked_bytes.max(SIZE_BYTES_MIN).next_multiple_of(BLOCK_SIZE as u64);
    if limit_bytes != 0 && size > limit_bytes {
        return Err(Error::OutOfRange(format!(
            "size: no size between {asked_bytes} and {limit_bytes} bytes is possible: a volume \
             has at least {SIZE_BYTES_MIN} bytes and whole blocks of {BLOCK_SIZE}"
        )));
    }
    Ok(size)
}

/// Refuses a size on which the volume's own file system cannot be made: a node would find out at
/// the first mount only.
pub(crate) fn check_file_system(spec: &Spec, size_bytes: u64) -> Result<(), Error> {
    if spec.options.fs_type == Some(FileSystem::Xfs) && size_bytes < api::XFS_BYTES_MIN {
        let (size, least) = (text::bytes(size_bytes), text::bytes(api::XFS_BYTES_MIN));
        return Err(Error::OutOfRange(format!(
            "size: {size} are too little for xfs, which needs {least}: make the volume larger, or \
             use ext4"
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use quoin_api::volume::Spread;

    use super::*;
    use proptest::prelude::*;

    #[test]
    fn more_replicas_than_are_allowed_are_refused_with_the_flag_that_allows_more() {
        assert!(check_replicas("replicas", 5, REPLICAS_MAX).is_ok());
        let refused = check_replicas("replicas", 6, REPLICAS_MAX).unwrap_err().to_string();
        assert!(refused.contains("at most 5") && refused.contains("--max-replicas"), "{refused}");
        assert!(check_replicas("replicas", 6, REPLICAS_HARD_MAX).is_ok());
        let refused = check_replicas("replicas", 9, REPLICAS_HARD_MAX).unwrap_err().to_string();
        assert!(refused.ends_with("at most 8"), "{refused}");
    }

    const DEFAULTS: Defaults = Defaults { replicas: 3, spread: Spread::Host };

    fn asked() -> VolumeSpec {
        VolumeSpec { name: "db".into(), ..VolumeSpec::default() }
    }

    fn refusal(spec: VolumeSpec) -> String {
        complete(&spec, DEFAULTS).unwrap_err().to_string()
    }

    #[test]
    fn fields_that_are_left_open_get_their_defaults() {
        let spec = complete(&asked(), DEFAULTS).unwrap();
        assert_eq!((spec.replicas, spec.consistency_factor), (3, 2));
        assert_eq!(spec.options.spread, Spread::Host);
        let again = complete(&VolumeSpec::from(&spec), DEFAULTS).unwrap();
        assert_eq!(again, spec, "a completed spec is complete");
    }

    #[test]
    fn the_consistency_factor_of_1_to_5_replicas_is_1_2_2_3_3() {
        let factor = |replicas| {
            complete(&VolumeSpec { replicas, ..asked() }, DEFAULTS).unwrap().consistency_factor
        };
        assert_eq!([1, 2, 3, 4, 5].map(factor), [1, 2, 2, 3, 3]);
    }

    #[test]
    fn a_consistency_factor_below_a_majority_must_be_accepted_in_words() {
        let small = VolumeSpec { replicas: 3, consistency_factor: 1, ..asked() };
        assert!(refusal(small.clone()).contains("allowLossOnSingleFailure"));
        let accepted = VolumeSpec { allow_loss_on_single_failure: true, ..small };
        assert_eq!(complete(&accepted, DEFAULTS).unwrap().consistency_factor, 1);
        let large = VolumeSpec { replicas: 3, consistency_factor: 4, ..asked() };
        assert!(refusal(large).contains("more than the 3 replicas"));
        let all = VolumeSpec { replicas: 3, consistency_factor: 3, ..asked() };
        assert_eq!(complete(&all, DEFAULTS).unwrap().consistency_factor, 3);
    }

    #[test]
    fn every_refusal_names_its_field() {
        let with = |change: fn(&mut VolumeSpec)| {
            let mut spec = asked();
            change(&mut spec);
            refusal(spec)
        };
        assert!(with(|s| s.name = String::new()).starts_with("name:"));
        assert!(with(|s| s.name = "a\u{1}".into()).contains("U+0001"));
        assert!(with(|s| s.name = "a\u{85}".into()).contains("U+0085"));
        assert!(with(|s| s.name = "x".repeat(129)).contains("at most 128"));
        assert!(with(|s| s.replicas = REPLICAS_HARD_MAX + 1).starts_with("replicas:"));
        assert!(with(|s| s.block_size = 1024).starts_with("blockSize:"));
        assert!(with(|s| s.bandwidth_limit = 100).starts_with("bandwidthLimit:"));
        assert!(with(|s| s.replace_after = "soon".into()).contains("\"soon\" is neither a time"));
        assert!(with(|s| s.reads = "maybe".into()).contains("leased | confirmed"));
        assert!(with(|s| s.fs_type = "zfs".into()).contains("ext4 | xfs"));
        assert!(
            with(|s| drop(s.parameters.insert("k".into(), "v".repeat(5000))))
                .starts_with("parameters:")
        );
    }

    #[test]
    fn encryption_needs_blocks_of_4_kib_and_slots_that_keep_their_rules() {
        let user = quoin_encryption::UserKey::parse(b"correct horse").unwrap();
        let given = api::Encryption::from(&Encryption::create(&user, "a").unwrap());
        let with = |encryption: &api::Encryption, block_size| VolumeSpec {
            encryption: Some(encryption.clone()),
            block_size,
            ..asked()
        };
        for block_size in [0, 4096] {
            let spec = complete(&with(&given, block_size), DEFAULTS).unwrap();
            assert_eq!(VolumeSpec::from(&spec).encryption.as_ref(), Some(&given));
        }
        assert!(refusal(with(&given, 512)).starts_with("blockSize: 512 bytes"));
        let mut spoilt = given;
        spoilt.slots.clear();
        assert!(refusal(with(&spoilt, 0)).starts_with("encryption:"));
    }

    #[test]
    fn names_of_128_characters_and_of_any_script_are_taken() {
        for name in ["a", &"a".repeat(128), "pvc-0F3A", "größe/1 %", "名前"] {
            check_name(name).unwrap();
        }
    }

    #[test]
    fn sizes_are_whole_blocks_within_the_limits() {
        assert_eq!(size(1, 0).unwrap(), SIZE_BYTES_MIN);
        assert_eq!(size(SIZE_BYTES_MIN + 1, 0).unwrap(), SIZE_BYTES_MIN + 4096);
        assert_eq!(size(SIZE_BYTES_MAX, 0).unwrap(), SIZE_BYTES_MAX);
        let code = |asked, limit| size(asked, limit).unwrap_err().code();
        assert_eq!(code(0, 0), tonic::Code::InvalidArgument);
        assert_eq!(code(1 << 63, 0), tonic::Code::OutOfRange);
        assert_eq!(code(u64::MAX, 0), tonic::Code::OutOfRange);
        assert_eq!(code(2 << 20, 1 << 20), tonic::Code::InvalidArgument);
        assert_eq!(code(100, 200), tonic::Code::OutOfRange);
    }

    proptest! {
        #[test]
        fn a_size_is_never_below_what_was_asked_nor_above_the_limit(asked: u64, limit: u64) {
            if let Ok(size) = size(asked, limit) {
                prop_assert!(size >= asked && size % 4096 == 0 && size <= SIZE_BYTES_MAX);
                prop_assert!(limit == 0 || size <= limit);
            }
        }

        #[test]
        fn no_name_panics(name in ".*") {
            let _ = check_name(&name);
        }
    }
}
