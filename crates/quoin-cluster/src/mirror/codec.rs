//! Bytes of records and messages. They come from another cluster, or from a backup: every count is held
//! against its limit, and every length against what is left.

use bytes::{BufMut, Bytes, BytesMut};
use quoin_types::VOLUME_BLOCKS_MAX;
use quoin_types::codec::{Malformed, Reader, Writer};
use quoin_types::ids::{GroupId, PointId, VolumeId};

use super::chain::{Begun, Chain, ClusterId, Generation};
use super::record::{Claim, Claims, Member, Parameters, Points, Receiving, Record, Role, Transfer};
use super::session::Header;
use super::word::{Message, Offer, Want, Word};
use super::{BYTES_MAX, GENERATIONS_MAX, MEMBERS_MAX, POINTS_TOLD_MAX};

/// First byte of each.
const RECORD: u8 = 1;
const MESSAGE: u8 = 1;

type Read<T> = Result<T, Malformed>;

fn put_role(out: &mut BytesMut, role: Role) {
    let place = Role::ALL.iter().position(|other| *other == role);
    out.put_u8(place.and_then(|place| u8::try_from(place).ok()).unwrap_or(0));
}

fn role(from: &mut Reader) -> Read<Role> {
    let place = from.u8("role")?;
    Role::ALL.get(usize::from(place)).copied().ok_or(Malformed("role"))
}

fn put_option<T>(out: &mut BytesMut, value: Option<T>, put: impl FnOnce(&mut BytesMut, T)) {
    out.put_flag(value.is_some());
    if let Some(value) = value {
        put(out, value);
    }
}

fn option<T>(
    from: &mut Reader,
    what: &'static str,
    read: impl FnOnce(&mut Reader) -> Read<T>,
) -> Read<Option<T>> {
    if from.bool(what)? { read(from).map(Some) } else { Ok(None) }
}

/// A list of at most so many items, each of which has at least `length` bytes.
fn list<T>(
    from: &mut Reader,
    (max, length): (usize, usize),
    what: &'static str,
    mut read: impl FnMut(&mut Reader) -> Read<T>,
) -> Read<Vec<T>> {
    let count = from.count(length, what)?;
    if count > max {
        return Err(Malformed(what));
    }
    (0..count).map(|_| read(from)).collect()
}

fn put_point(out: &mut BytesMut, point: Option<PointId>) {
    put_option(out, point, |out, point| out.put_u128_le(point.0));
}

fn point(from: &mut Reader, what: &'static str) -> Read<Option<PointId>> {
    option(from, what, |from| from.u128(what).map(PointId))
}

fn put_begun(out: &mut BytesMut, begun: &Begun) {
    out.put_u64_le(begun.generation.number);
    out.put_u128_le(begun.generation.cluster.0);
    out.put_u128_le(begun.generation.id);
    put_point(out, begun.at);
}

fn begun(from: &mut Reader) -> Read<Begun> {
    let number = from.u64("generation")?;
    let cluster = ClusterId(from.u128("cluster of a generation")?);
    let generation = Generation { number, cluster, id: from.u128("id of a generation")? };
    Ok(Begun { generation, at: point(from, "beginning of a generation")? })
}

fn put_chain(out: &mut BytesMut, chain: &Chain) {
    out.put_count(chain.all().len());
    chain.all().iter().for_each(|begun| put_begun(out, begun));
}

fn chain(from: &mut Reader) -> Read<Chain> {
    let all = list(from, (GENERATIONS_MAX, 41), "chain", begun)?;
    Chain::of(all).ok_or(Malformed("chain"))
}

fn put_transfer(out: &mut BytesMut, transfer: Transfer) {
    out.put_u128_le(transfer.point.0);
    put_point(out, transfer.base);
}

fn transfer(from: &mut Reader) -> Read<Transfer> {
    Ok(Transfer { point: PointId(from.u128("point")?), base: point(from, "base")? })
}

fn put_claim(out: &mut BytesMut, claim: Option<Claim>) {
    put_option(out, claim, |out, claim| {
        out.put_u64_le(claim.number);
        out.put_u128_le(claim.point.0);
        out.put_u128_le(claim.id);
    });
}

fn claim(from: &mut Reader) -> Read<Option<Claim>> {
    option(from, "claim", |from| {
        let number = from.u64("claim")?;
        Ok(Claim { number, point: PointId(from.u128("claim")?), id: from.u128("claim")? })
    })
}

fn put_members(out: &mut BytesMut, members: &[Member]) {
    out.put_count(members.len());
    for member in members {
        out.put_u128_le(member.volume.0);
        out.put_flag(member.has_base);
    }
}

fn members(from: &mut Reader) -> Read<Vec<Member>> {
    let members = list(from, (MEMBERS_MAX, 17), "members", |from| {
        Ok(Member { volume: VolumeId(from.u128("member")?), has_base: from.bool("member")? })
    })?;
    let mut volumes: Vec<VolumeId> = members.iter().map(|member| member.volume).collect();
    volumes.sort_unstable();
    volumes.dedup();
    if volumes.len() == members.len() { Ok(members) } else { Err(Malformed("members")) }
}

fn put_cursors(out: &mut BytesMut, cursors: &[u64]) {
    out.put_count(cursors.len());
    cursors.iter().for_each(|cursor| out.put_u64_le(*cursor));
}

fn cursors(from: &mut Reader) -> Read<Vec<u64>> {
    list(from, (MEMBERS_MAX, 8), "cursors", |from| from.u64("cursor"))
}

/// Sizes in blocks.
fn sizes(from: &mut Reader) -> Read<Vec<u64>> {
    list(from, (MEMBERS_MAX, 8), "sizes", |from| {
        let blocks = from.u64("size")?;
        if blocks <= VOLUME_BLOCKS_MAX { Ok(blocks) } else { Err(Malformed("size")) }
    })
}

fn put_parameters(out: &mut BytesMut, parameters: Parameters) {
    out.put_u64_le(parameters.interval_s);
    out.put_flag(parameters.may_take_over);
}

fn parameters(from: &mut Reader) -> Read<Parameters> {
    Ok(Parameters { interval_s: from.u64("interval")?, may_take_over: from.bool("take-over")? })
}

fn bounded(bytes: &[u8], first: u8, what: &'static str) -> Read<Reader> {
    if bytes.len() > BYTES_MAX {
        return Err(Malformed(what));
    }
    let mut from = Reader::new(Bytes::copy_from_slice(bytes));
    if from.u8(what)? == first { Ok(from) } else { Err(Malformed(what)) }
}

impl Message {
    pub fn encode(&self) -> Vec<u8> {
        let mut out = BytesMut::new();
        out.put_u8(MESSAGE);
        out.put_u128_le(self.group.0);
        let Header { life, number, challenge, answer } = self.header;
        [life, number, challenge, answer].into_iter().for_each(|n| out.put_u64_le(n));
        put_option(&mut out, self.word.as_ref(), |out, word| word.put(out));
        out.to_vec()
    }

    /// Bytes of another form, or beyond a limit, are an error.
    pub fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut from = bounded(bytes, MESSAGE, "message")?;
        let group = GroupId(from.u128("group")?);
        let mut number = || from.u64("header");
        let header =
            Header { life: number()?, number: number()?, challenge: number()?, answer: number()? };
        let word = option(&mut from, "word", Word::read)?;
        from.end("message")?;
        Ok(Self { group, header, word })
    }
}

impl Word {
    fn put(&self, out: &mut BytesMut) {
        put_role(out, self.role);
        put_chain(out, &self.chain);
        put_members(out, &self.members);
        out.put_count(self.held.len());
        self.held.iter().for_each(|point| out.put_u128_le(point.0));
        put_option(out, self.offer.as_ref(), |out, offer| {
            put_transfer(out, offer.transfer);
            out.put_u64_le(offer.cut_ms);
            put_cursors(out, &offer.blocks);
        });
        put_option(out, self.want.as_ref(), |out, want| {
            put_transfer(out, want.transfer);
            out.put_u128_le(want.token);
            put_cursors(out, &want.cursors);
        });
        [self.complete, self.common, self.last].into_iter().for_each(|point| put_point(out, point));
        [self.claim, self.yielded].into_iter().for_each(|claim| put_claim(out, claim));
        out.put_flag(self.asks_step_down);
        [self.resync, self.heard_resync].into_iter().for_each(|point| put_point(out, point));
        put_parameters(out, self.parameters);
    }

    fn read(from: &mut Reader) -> Read<Self> {
        let word = Self {
            role: role(from)?,
            chain: chain(from)?,
            members: members(from)?,
            held: list(from, (POINTS_TOLD_MAX, 16), "held", |from| from.u128("held").map(PointId))?,
            offer: option(from, "offer", |from| {
                let (transfer, cut_ms) = (transfer(from)?, from.u64("offer")?);
                Ok(Offer { transfer, cut_ms, blocks: sizes(from)? })
            })?,
            want: option(from, "want", |from| {
                let transfer = transfer(from)?;
                Ok(Want { transfer, token: from.u128("token")?, cursors: cursors(from)? })
            })?,
            complete: point(from, "complete")?,
            common: point(from, "common")?,
            last: point(from, "last")?,
            claim: claim(from)?,
            yielded: claim(from)?,
            asks_step_down: from.bool("step down")?,
            resync: point(from, "resync")?,
            heard_resync: point(from, "resync")?,
            parameters: parameters(from)?,
        };
        let sizes = word.offer.as_ref().map(|offer| offer.blocks.len());
        match sizes.is_none_or(|sizes| sizes == word.members.len()) {
            true => Ok(word),
            false => Err(Malformed("sizes")),
        }
    }
}

impl Record {
    pub fn encode(&self) -> Vec<u8> {
        let mut out = BytesMut::new();
        out.put_u8(RECORD);
        out.put_u128_le(self.group.0);
        out.put_u128_le(self.cluster.0);
        out.put_u128_le(self.peer.0);
        out.put_u64_le(self.term);
        put_role(&mut out, self.role);
        put_members(&mut out, &self.members);
        put_chain(&mut out, &self.chain);
        let points = &self.points;
        let known = [points.cutting, points.dropping, points.offered];
        for point in known.into_iter().chain([points.complete, points.common, points.last]) {
            put_point(&mut out, point);
        }
        out.put_u64_le(points.offered_cut_ms);
        out.put_u64_le(points.common_cut_ms);
        out.put_u64_le(points.complete_cut_ms);
        put_option(&mut out, self.receiving.as_ref(), |out, receiving| {
            put_transfer(out, receiving.transfer);
            out.put_flag(receiving.is_begun);
            put_cursors(out, &receiving.cursors);
            out.put_u128_le(receiving.token);
            out.put_u64_le(receiving.cut_ms);
            put_cursors(out, &receiving.blocks);
        });
        let claims = &self.claims;
        for claim in [claims.own, claims.yielded, claims.promoting] {
            put_claim(&mut out, claim);
        }
        out.put_flag(claims.is_forced);
        out.put_u128_le(self.fence);
        [self.is_unsure, self.asks_step_down, self.is_paired]
            .into_iter()
            .for_each(|flag| out.put_flag(flag));
        put_parameters(&mut out, self.parameters);
        put_point(&mut out, self.lost);
        out.to_vec()
    }

    /// Bytes of another form, or beyond a limit, are an error.
    pub fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut from = bounded(bytes, RECORD, "record of a mirror")?;
        let from = &mut from;
        let record = Self {
            group: GroupId(from.u128("group")?),
            cluster: ClusterId(from.u128("cluster")?),
            peer: ClusterId(from.u128("peer")?),
            term: from.u64("term")?,
            role: role(from)?,
            members: members(from)?,
            chain: chain(from)?,
            points: Points {
                cutting: point(from, "cutting")?,
                dropping: point(from, "dropping")?,
                offered: point(from, "offered")?,
                complete: point(from, "complete")?,
                common: point(from, "common")?,
                last: point(from, "last")?,
                offered_cut_ms: from.u64("time of a cut")?,
                common_cut_ms: from.u64("time of a cut")?,
                complete_cut_ms: from.u64("time of a cut")?,
            },
            receiving: option(from, "transfer", |from| {
                Ok(Receiving {
                    transfer: transfer(from)?,
                    is_begun: from.bool("transfer")?,
                    cursors: cursors(from)?,
                    token: from.u128("token")?,
                    cut_ms: from.u64("time of a cut")?,
                    blocks: sizes(from)?,
                })
            })?,
            claims: Claims {
                own: claim(from)?,
                yielded: claim(from)?,
                promoting: claim(from)?,
                is_forced: from.bool("force")?,
            },
            fence: from.u128("fence")?,
            is_unsure: from.bool("flags")?,
            asks_step_down: from.bool("flags")?,
            is_paired: from.bool("flags")?,
            parameters: parameters(from)?,
            lost: point(from, "lost")?,
        };
        let is_of_all = |receiving: &Receiving| {
            [receiving.cursors.len(), receiving.blocks.len()] == [record.members.len(); 2]
        };
        if !record.receiving.as_ref().is_none_or(is_of_all) {
            return Err(Malformed("cursors"));
        }
        from.end("record of a mirror")?;
        Ok(record)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn points() -> impl Strategy<Value = Option<PointId>> {
        proptest::option::of(any::<u128>().prop_map(PointId))
    }

    fn roles() -> impl Strategy<Value = Role> {
        (0..Role::ALL.len()).prop_map(|place| Role::ALL[place])
    }

    fn chains() -> impl Strategy<Value = Chain> {
        let generation = (any::<u64>(), any::<[u128; 2]>(), points());
        proptest::collection::vec(generation, 1..=GENERATIONS_MAX).prop_map(|all| {
            let begun = all.into_iter().map(|(number, [cluster, id], at)| {
                let cluster = ClusterId(cluster);
                Begun { generation: Generation { number, cluster, id }, at }
            });
            Chain::of(begun.collect()).unwrap()
        })
    }

    fn claims() -> impl Strategy<Value = Option<Claim>> {
        let claim = (any::<u64>(), any::<u128>(), any::<u128>());
        proptest::option::of(claim.prop_map(|(number, point, id)| Claim {
            number,
            point: PointId(point),
            id,
        }))
    }

    fn transfers() -> impl Strategy<Value = Transfer> {
        (any::<u128>(), points()).prop_map(|(point, base)| Transfer { point: PointId(point), base })
    }

    fn members() -> impl Strategy<Value = Vec<Member>> {
        proptest::collection::btree_map(any::<u128>(), any::<bool>(), 0..=MEMBERS_MAX).prop_map(
            |all| {
                let member = |(volume, has_base)| Member { volume: VolumeId(volume), has_base };
                all.into_iter().map(member).collect()
            },
        )
    }

    fn words() -> impl Strategy<Value = Word> {
        let told = (roles(), chains(), members(), points(), points(), points(), claims(), claims());
        let held = proptest::collection::vec(any::<u128>().prop_map(PointId), 0..=POINTS_TOLD_MAX);
        let cursors = proptest::collection::vec(any::<u64>(), 0..=MEMBERS_MAX);
        let want = proptest::option::of((transfers(), any::<u128>(), cursors));
        let offer = proptest::option::of((transfers(), any::<u64>(), 0..=VOLUME_BLOCKS_MAX));
        (told, held, want, offer, any::<(bool, u64, bool)>()).prop_map(
            |(
                (role, chain, members, complete, common, last, claim, yielded),
                held,
                want,
                offer,
                flags,
            )| {
                let (asks_step_down, interval_s, may_take_over) = flags;
                let all = members.len();
                Word {
                    role,
                    chain,
                    members,
                    held,
                    offer: offer.map(|(transfer, cut_ms, size)| Offer {
                        transfer,
                        cut_ms,
                        blocks: vec![size; all],
                    }),
                    want: want.map(|(transfer, token, cursors)| Want { transfer, token, cursors }),
                    complete,
                    common,
                    last,
                    claim,
                    yielded,
                    asks_step_down,
                    resync: last,
                    heard_resync: common,
                    parameters: Parameters { interval_s, may_take_over },
                }
            },
        )
    }

    fn messages() -> impl Strategy<Value = Message> {
        (any::<u128>(), any::<[u64; 4]>(), proptest::option::of(words())).prop_map(
            |(group, [life, number, challenge, answer], word)| Message {
                group: GroupId(group),
                header: Header { life, number, challenge, answer },
                word,
            },
        )
    }

    fn records() -> impl Strategy<Value = Record> {
        let who = (any::<[u128; 3]>(), any::<u64>(), roles(), members(), chains());
        let known =
            (proptest::array::uniform6(points()), any::<[u64; 4]>(), transfers(), any::<bool>());
        let rest =
            (proptest::array::uniform3(claims()), any::<[bool; 6]>(), any::<u128>(), points());
        (who, known, rest).prop_map(|(who, known, rest)| {
            let ([group, cluster, peer], term, role, members, chain) = who;
            let (
                [cutting, dropping, offered, complete, common, last],
                times,
                transfer,
                is_receiving,
            ) = known;
            let ([own, yielded, promoting], flags, fence, lost) = rest;
            let receiving = is_receiving.then(|| Receiving {
                transfer,
                is_begun: flags[0],
                cursors: members.iter().map(|_| times[0]).collect(),
                token: fence,
                cut_ms: times[1],
                blocks: members.iter().map(|_| times[0] % VOLUME_BLOCKS_MAX).collect(),
            });
            Record {
                group: GroupId(group),
                cluster: ClusterId(cluster),
                peer: ClusterId(peer),
                term,
                role,
                members,
                chain,
                points: Points {
                    cutting,
                    dropping,
                    offered,
                    complete,
                    common,
                    last,
                    offered_cut_ms: times[2],
                    common_cut_ms: times[3],
                    complete_cut_ms: times[1],
                },
                receiving,
                claims: Claims { own, yielded, promoting, is_forced: flags[1] },
                fence,
                is_unsure: flags[2],
                asks_step_down: flags[3],
                is_paired: flags[4],
                parameters: Parameters { interval_s: times[0], may_take_over: flags[5] },
                lost,
            }
        })
    }

    proptest! {
        #[test]
        fn records_and_messages_survive_their_bytes_within_the_limit(
            record in records(), message in messages(),
        ) {
            let (bytes, sent) = (record.encode(), message.encode());
            prop_assert!(bytes.len() <= BYTES_MAX && sent.len() <= BYTES_MAX);
            prop_assert_eq!(Record::decode(&bytes).unwrap(), record);
            prop_assert_eq!(Message::decode(&sent).unwrap(), message);
        }

        #[test]
        fn bytes_that_are_short_long_or_changed_are_refused_or_read_as_what_they_say(
            message in messages(), record in records(), at in any::<prop::sample::Index>(), byte in any::<u8>(),
        ) {
            for mut bytes in [message.encode(), record.encode()] {
                let at = at.index(bytes.len());
                prop_assert!(Message::decode(&bytes[..at]).is_err());
                prop_assert!(Record::decode(&bytes[..at]).is_err());
                bytes[at] = byte;
                if let Ok(read) = Message::decode(&bytes) {
                    prop_assert_eq!(read.encode(), bytes.clone());
                }
                if let Ok(read) = Record::decode(&bytes) {
                    prop_assert_eq!(read.encode(), bytes.clone());
                }
                bytes.push(0);
                prop_assert!(Message::decode(&bytes).is_err() && Record::decode(&bytes).is_err());
            }
        }

        #[test]
        fn any_bytes_are_refused_without_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..2000)) {
            let mut bytes = bytes;
            let _ = (Message::decode(&bytes), Record::decode(&bytes));
            if let Some(first) = bytes.first_mut() {
                *first = MESSAGE;
            }
            let _ = (Message::decode(&bytes), Record::decode(&bytes));
        }
    }

    #[test]
    fn a_list_beyond_its_limit_and_a_member_that_comes_twice_are_refused() {
        let cluster = [ClusterId(1), ClusterId(2)];
        let parameters = Parameters { interval_s: 10, may_take_over: false };
        let of = |volumes: Vec<VolumeId>| {
            Record::primary(GroupId(1), cluster, volumes, parameters).encode()
        };
        assert!(Record::decode(&of((0..128).map(VolumeId).collect())).is_ok());
        assert!(Record::decode(&of((0..129).map(VolumeId).collect())).is_err());
        assert!(Record::decode(&of(vec![VolumeId(1), VolumeId(1)])).is_err());
        assert!(Record::decode(&vec![RECORD; BYTES_MAX + 1]).is_err());
    }
}
