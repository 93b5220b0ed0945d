//! Encoded values can be decoded again; hostile input is refused without harm.

use bytes::{Bytes, BytesMut};
use proptest::prelude::*;
use quoin_types::codec::Reader;
use quoin_types::entry::Rule;
use quoin_types::*;

fn member() -> impl Strategy<Value = Member> {
    (any::<u128>(), any::<u128>())
        .prop_map(|(id, guid)| Member { id: ReplicaId(id), guid: ReplicaGuid(guid) })
}

fn rule() -> impl Strategy<Value = Rule> {
    (any::<u64>(), 1..=16u8, prop::collection::vec(member(), 0..=16)).prop_flat_map(
        |(membership_version, rf, mut known)| {
            known.truncate(rf.into());
            (1..=rf).prop_map(move |cf| Rule { membership_version, rf, cf, known: known.clone() })
        },
    )
}

fn view() -> impl Strategy<Value = View> {
    (
        prop::collection::vec(member(), 0..=16),
        rule(),
        prop::option::of(rule()),
        any::<bool>(),
        any::<bool>(),
    )
        .prop_map(|(in_sync, rule, joint, media, unflushed_tail_lost)| View {
            in_sync,
            rule,
            joint,
            durability: if media { Durability::Media } else { Durability::Cache },
            unflushed_tail_lost,
        })
}

fn kind() -> impl Strategy<Value = EntryKind> {
    prop_oneof![
        Just(EntryKind::Write),
        Just(EntryKind::Trim),
        any::<bool>().prop_map(|no_hole| EntryKind::Zero { no_hole }),
        (any::<u128>(), any::<bool>())
            .prop_map(|(id, hidden)| EntryKind::Snapshot { id: SnapshotId(id), hidden }),
        any::<u128>().prop_map(|id| EntryKind::DeleteSnapshot { id: SnapshotId(id) }),
        any::<u128>().prop_map(|id| EntryKind::Revert { id: SnapshotId(id) }),
        (1..=VOLUME_BLOCKS_MAX).prop_map(|blocks| EntryKind::Resize { blocks }),
        view().prop_map(|v| EntryKind::View(Box::new(v))),
    ]
}

proptest! {
    #[test]
    fn every_kind_of_entry_survives_its_encoding(kind in kind()) {
        let decoded = EntryKind::decode(kind.code(), kind.encode_payload());
        prop_assert_eq!(decoded.unwrap(), kind);
    }

    #[test]
    fn no_payload_makes_the_decoder_panic(code: u8, payload: Vec<u8>) {
        let _ = EntryKind::decode(code, Bytes::from(payload));
    }

    #[test]
    fn a_membership_survives_its_encoding_or_is_refused_as_unsound(
        version: u64,
        rf in 1..=16u8,
        known in prop::collection::vec(member(), 0..=16),
        formed: bool,
    ) {
        let retired = vec![ReplicaGuid(1)];
        let membership = Membership { version, rf, cf: rf, drf: rf, known, retired, formed };
        let mut out = BytesMut::new();
        membership.encode(&mut out);
        let decoded = Membership::decode(&mut Reader::new(out.freeze()));
        prop_assert_eq!(decoded.is_ok(), membership.check().is_ok());
        if let Ok(decoded) = decoded {
            prop_assert_eq!(decoded, membership);
        }
    }

    #[test]
    fn no_bytes_make_the_membership_decoder_panic(bytes: Vec<u8>) {
        let _ = Membership::decode(&mut Reader::new(Bytes::from(bytes)));
    }

    /// OneContent: entries that differ in any way have different chains.
    #[test]
    fn entries_that_differ_have_different_chains(
        a in kind(), b in kind(), lba in 0..1000u64, fill: u8, other: u8,
    ) {
        let make = |kind: &EntryKind, fill: u8| {
            let position = Position { epoch: Epoch(1), lsn: Lsn(1) };
            let data = match kind {
                EntryKind::Write => Bytes::from(vec![fill; BLOCK_SIZE]),
                _ => Bytes::new(),
            };
            Entry::after(Chain(7), position, kind.clone(), lba, 1, data, false)
        };
        let (x, y) = (make(&a, fill), make(&b, other));
        prop_assert_eq!(x.chain == y.chain, x.kind == y.kind && x.data == y.data);
    }
}
