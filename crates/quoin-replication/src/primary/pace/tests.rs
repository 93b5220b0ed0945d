//! The pace beside simulated clients: closed loops whose latency grows with the copying.

use super::*;

/// A machine that serves `depth` requests at a time, each in `alone_us` while nothing is copied.
/// Copying at `full_bytes_per_s` would use all of it.
struct Machine {
    alone_us: u64,
    full_bytes_per_s: u64,
    /// Time for which copied data still burdens the machine.
    burden: Duration,
}

struct Outcome {
    /// IOs of one client in a second.
    rate: f64,
    copied_per_s: f64,
}

const STEP: Duration = Duration::from_micros(10);

/// Runs for this long from `now`, with or without a client, and copies if `copying`.
fn run(
    machine: &Machine,
    pace: &mut Pace,
    now: &mut Time,
    length: Duration,
    client: bool,
    copying: bool,
) -> Outcome {
    let began = *now;
    let (mut ios, mut copied) = (0u64, 0u64);
    let mut arrived = *now;
    // Recent share of the machine that copying took.
    let mut share = 0.0f64;
    while *now < began + length {
        *now = *now + STEP;
        let mut bytes = 0;
        if copying && pace.may_copy(*now) {
            let most = machine.full_bytes_per_s * STEP.as_micros() as u64 / 1_000_000;
            bytes = most.min(u64::from(pace.chunk_bytes()));
            pace.copied(*now, bytes);
            copied += bytes;
        }
        let wanted = machine.full_bytes_per_s as f64 * STEP.as_secs_f64();
        share += (bytes as f64 / wanted - share) * STEP.div_duration_f64(machine.burden);
        let takes_us = machine.alone_us as f64 / (1.0 - share.clamp(0.0, 0.9));
        if client && now.since(arrived).as_micros() as f64 >= takes_us {
            pace.answered(*now, arrived, Kind::Write, 4096);
            arrived = *now;
            ios += 1;
        }
        pace.step(*now, copying.then_some(1), client, || true);
    }
    let seconds = length.as_secs_f64();
    Outcome { rate: ios as f64 / seconds, copied_per_s: copied as f64 / seconds }
}

const FAST: Machine =
    Machine { alone_us: 200, full_bytes_per_s: 800 << 20, burden: Duration::from_millis(1) };
const SECONDS: Duration = Duration::from_secs(4);

#[test]
fn clients_keep_seven_tenths_of_their_rate_beside_a_rebuild_that_progresses() {
    for alone_us in [150, 400, 2000, 10_000] {
        let machine = Machine { alone_us, ..FAST };
        let (mut pace, mut now) = (Pace::new(), Time::from_millis(10));
        let alone = run(&machine, &mut pace, &mut now, SECONDS, true, false);
        let beside = run(&machine, &mut pace, &mut now, SECONDS, true, true);
        let kept = beside.rate / alone.rate;
        assert!(kept >= 0.7, "{alone_us}: {kept}");
        assert!(beside.copied_per_s > 32.0 * f64::from(1 << 20), "{}", beside.copied_per_s);
    }
}

#[test]
fn a_probe_with_data_still_on_its_way_to_disks_sets_no_new_baseline() {
    for burden_ms in [5, 20, 100, 1000] {
        let machine = Machine { burden: Duration::from_millis(burden_ms), ..FAST };
        let (mut pace, mut now) = (Pace::new(), Time::from_millis(10));
        let alone = run(&machine, &mut pace, &mut now, SECONDS, true, false);
        let beside = run(&machine, &mut pace, &mut now, 3 * SECONDS, true, true);
        let kept = beside.rate / alone.rate;
        assert!(kept >= 0.7, "{burden_ms} ms: {kept}");
        assert!(beside.copied_per_s > 0.9 * FLOOR_BYTES_PER_S as f64, "{}", beside.copied_per_s);
    }
}

#[test]
fn a_rebuild_that_begins_with_the_volume_finds_its_baseline_by_pausing() {
    let (mut pace, mut now) = (Pace::new(), Time::from_millis(10));
    let beside = run(&FAST, &mut pace, &mut now, SECONDS, true, true);
    let (mut fresh, mut later) = (Pace::new(), Time::from_millis(10));
    let alone = run(&FAST, &mut fresh, &mut later, SECONDS, true, false);
    assert!(beside.rate / alone.rate >= 0.7, "{}", beside.rate / alone.rate);
}

#[test]
fn idle_clients_leave_a_rebuild_its_full_speed_at_once_and_get_theirs_back_at_once() {
    let (mut pace, mut now) = (Pace::new(), Time::from_millis(10));
    let alone = run(&FAST, &mut pace, &mut now, SECONDS, true, false);
    run(&FAST, &mut pace, &mut now, SECONDS, true, true);
    let idle = run(&FAST, &mut pace, &mut now, Duration::from_secs(1), false, true);
    assert!(idle.copied_per_s > 0.8 * FAST.full_bytes_per_s as f64, "{}", idle.copied_per_s);
    let back = run(&FAST, &mut pace, &mut now, Duration::from_millis(300), true, true);
    assert!(back.rate / alone.rate >= 0.7, "{}", back.rate / alone.rate);
}

#[test]
fn a_load_that_becomes_heavier_for_good_is_not_taken_for_the_rebuild_s_doing_for_ever() {
    let (mut pace, mut now) = (Pace::new(), Time::from_millis(10));
    run(&FAST, &mut pace, &mut now, SECONDS, true, false);
    let heavier = Machine { alone_us: 1000, ..FAST };
    run(&heavier, &mut pace, &mut now, Duration::from_secs(10), true, true);
    let beside = run(&heavier, &mut pace, &mut now, SECONDS, true, true);
    assert!(beside.copied_per_s > 4.0 * FLOOR_BYTES_PER_S as f64, "{}", beside.copied_per_s);
}

#[test]
fn a_rebuild_progresses_even_if_io_is_slow_at_any_rate() {
    let (mut pace, mut now) = (Pace::new(), Time::from_millis(10));
    run(&FAST, &mut pace, &mut now, SECONDS, true, false);
    let mut copied = 0;
    let began = now;
    while now < began + SECONDS {
        now = now + STEP;
        if pace.may_copy(now) {
            pace.copied(now, u64::from(pace.chunk_bytes()));
            copied += u64::from(pace.chunk_bytes());
            // Ten times the baseline, but only while data is copied.
            let arrived = now - Duration::from_millis(2);
            pace.answered(now, arrived.max(pace.since), Kind::Write, 4096);
        } else {
            pace.answered(now, (now - Duration::from_micros(200)).max(pace.since), Kind::Write, 1);
        }
        pace.step(now, Some(1), true, || true);
    }
    assert!(copied as f64 / 4.0 >= 0.5 * FLOOR_BYTES_PER_S as f64, "{copied}");
}

#[test]
fn a_volume_that_is_faster_without_a_replica_gives_the_gain_to_the_rebuild() {
    let whole = Machine { alone_us: 280, ..FAST };
    let kept_beside = |known_whole: bool| {
        let (mut pace, mut now) = (Pace::new(), Time::from_millis(10));
        let machine = if known_whole { &whole } else { &FAST };
        run(machine, &mut pace, &mut now, SECONDS, true, false);
        let beside = run(&FAST, &mut pace, &mut now, SECONDS, true, true);
        let alone = run(machine, &mut Pace::new(), &mut now, SECONDS, true, false);
        assert!(beside.rate / alone.rate >= 0.7, "{}", beside.rate / alone.rate);
        beside.copied_per_s
    };
    let (gained, else_copied) = (kept_beside(true), kept_beside(false));
    assert!(gained > 1.2 * else_copied, "{gained} {else_copied}");

    // Baselines measured on a volume that lacks a replica are not what its users are used to.
    let mut pace = Pace::new();
    pace.healthy_ns = [280; KINDS];
    pace.step(Time::from_millis(500), None, true, || false);
    assert_eq!(pace.healthy_ns, [280; KINDS]);
}

#[test]
fn the_baseline_of_the_whole_volume_counts_up_to_a_quarter_above_the_present_one() {
    let known = index(Kind::Write, 4096);
    let speed = |healthy: u64| {
        let mut pace = Pace::new();
        (pace.baseline_ns[known], pace.healthy_ns[known]) = (1000, healthy);
        pace.sums[known] = Sum { count: 4, total_ns: 10_000 };
        pace.speed_now(Time::from_millis(1)).unwrap()
    };
    assert_eq!([0, 900, 1200, 1250, 4000].map(speed), [400, 400, 480, 500, 500]);
}

fn write(pace: &mut Pace, now: Time, took: Duration) {
    pace.answered(now, now - took, Kind::Write, 4096);
}

const MS: Duration = Duration::from_millis(1);

#[test]
fn io_that_arrived_in_another_mode_or_was_too_slow_to_be_load_is_no_sample() {
    let (mut pace, start) = (Pace::new(), Time::from_millis(10_000));
    pace.begin_mode(start);
    write(&mut pace, start + 5 * MS, 6 * MS);
    assert_eq!(pace.samples(), 0, "it arrived before");
    write(&mut pace, start + 2 * SAMPLE_MAX, SAMPLE_MAX + MS);
    assert_eq!(pace.samples(), 0, "it was held");
    write(&mut pace, start + 2 * SAMPLE_MAX, SAMPLE_MAX);
    write(&mut pace, start + 5 * MS, 5 * MS);
    assert_eq!(pace.samples(), 2);
    // The longest samples are those that overlap the start of a window.
    pace.begin(start + 7 * MS);
    write(&mut pace, start + 9 * MS, 9 * MS);
    assert_eq!(pace.samples(), 1, "in the window before, but of the same mode");
}

#[test]
fn a_probe_lasts_until_it_knows_enough_or_its_time_is_over_and_its_end_is_a_deadline() {
    for samples in [0, SAMPLES_MIN - 1, SAMPLES_MIN] {
        let (mut pace, start) = (Pace::new(), Time::from_millis(10_000));
        pace.step(start, Some(1), true, || true);
        assert!(!pace.may_copy(start), "nothing is known: it begins with a probe");
        let since = start + SETTLE;
        assert_eq!(pace.due(start), Some(since + PROBE_MAX));
        for _ in 0..samples {
            write(&mut pace, since + PROBE - MS, MS);
        }
        pace.step(since + PROBE - MS, Some(1), true, || true);
        assert!(!pace.may_copy(since + PROBE - MS), "it is too early");
        pace.step(since + PROBE, Some(1), true, || true);
        assert_eq!(pace.may_copy(since + PROBE), samples >= SAMPLES_MIN, "{samples}");
        pace.step(since + PROBE_MAX, Some(1), true, || true);
        assert!(pace.may_copy(since + PROBE_MAX));
        assert_eq!(pace.chunk_bytes(), CHUNK_BYTES_PACED);
        pace.copied(since + PROBE_MAX, 64 << 20);
        assert_eq!(pace.due(since + PROBE_MAX), Some(pace.next_at));
        assert_eq!(pace.due(pace.next_at), None);
    }
    let quiet = Pace::new();
    assert_eq!((quiet.chunk_bytes(), quiet.due(Time::from_millis(1))), (CHUNK_BYTES, None));
}

#[test]
fn baselines_follow_slowly_upwards_and_io_without_one_burdens_nobody() {
    let mut pace = Pace::new();
    let (known, unknown) = (index(Kind::Write, 4096), index(Kind::Read, 1 << 20));
    let mut learn = |baseline: u64, mean: u64| {
        pace.baseline_ns[known] = baseline;
        pace.sums = [Sum::default(); KINDS];
        pace.sums[known] = Sum { count: 4, total_ns: 4 * mean };
        pace.learn();
        pace.baseline_ns[known]
    };
    assert_eq!(learn(0, 700), 700);
    assert_eq!(learn(800, 1600), 900);
    assert_eq!(learn(800, 80_000), 900, "a hiccup");
    assert_eq!(learn(800, 400), 750);
    assert_eq!(learn(800, 200), 500);
    pace.baseline_ns[known] = 1000;
    pace.sums[known] = Sum { count: 4, total_ns: 6000 };
    assert_eq!(pace.speed_now(Time::from_millis(1)), Some(666));
    pace.sums[unknown] = Sum { count: 4, total_ns: 1 << 40 };
    assert_eq!(pace.speed_now(Time::from_millis(1)), Some(666));
    pace.sums[known].total_ns = 40;
    assert_eq!(pace.speed_now(Time::from_millis(1)), Some(SPEED_MAX));
    pace.sums[known] = Sum::default();
    assert_eq!(pace.speed_now(Time::from_millis(1)), None);
}

#[test]
fn a_judgement_spans_many_windows_and_moves_the_rate_by_the_bytes_copied() {
    // A window of 80 ms in a memory of 320 ms.
    let judged = |speed: u64, speed_now: u64, moved_bytes: u64| {
        let (mut pace, start) = (Pace::new(), Time::from_millis(10_000));
        pace.begin(start);
        (pace.bytes_per_s, pace.speed) = (64 << 20, speed);
        pace.baseline_ns[0] = speed_now;
        pace.sums[0] = Sum { count: 10, total_ns: 10 * 1000 };
        pace.moved_bytes = moved_bytes;
        pace.judge(start + 80 * MS);
        (pace.speed, pace.bytes_per_s >> 20)
    };
    let all = (64 << 20) * 8 / 100;
    assert_eq!(judged(1000, 1000, all), (1000, 72), "an eighth up");
    assert_eq!(judged(800, 800, all / 2 + 1), (800, 66), "up by what is left to the limit");
    assert_eq!(judged(1000, 1000, all / 2 - 1024), (1000, 64), "a rate that was not reached stays");
    assert_eq!(judged(700, 700, all), (700, 58), "down by what is too much");
    assert_eq!(judged(400, 400, all), (400, 48), "a quarter down at most");
    assert_eq!(judged(700, 700, all / 4), (700, 29), "of what was reached");
    assert_eq!(judged(1000, 400, all), (850, 64), "one window alone is a hiccup");
    assert_eq!(judged(700, 900, all), (750, 64), "and over as soon as it is over");
}

#[test]
fn a_disk_with_latency_spikes_at_any_rate_does_not_stop_a_rebuild() {
    let (mut pace, mut now) = (Pace::new(), Time::from_millis(10));
    run(&FAST, &mut pace, &mut now, SECONDS, true, false);
    let hiccup = Machine { alone_us: 8000, ..FAST };
    let mut copied_per_s = 0.0;
    for _ in 0..10 {
        copied_per_s += run(&FAST, &mut pace, &mut now, 360 * MS, true, true).copied_per_s / 10.0;
        run(&hiccup, &mut pace, &mut now, 40 * MS, true, true);
    }
    let smooth = run(&FAST, &mut Pace::new(), &mut now, SECONDS, true, true).copied_per_s;
    assert!(copied_per_s > 0.5 * smooth, "{copied_per_s} {smooth}");
}

/// Result of a window in which clients were served at their recent speed, and this much was copied.
fn judged(speed: u64, copied_bytes: u64) -> (u64, u64) {
    let mut pace = Pace::new();
    pace.step(Time::from_millis(0), Some(1), true, || true);
    pace.baseline_ns = [speed; KINDS];
    (pace.mode, pace.bytes_per_s, pace.speed) = (Mode::Copy, 64 << 20, speed);
    pace.begin(Time::from_millis(0));
    pace.sums[0] = Sum { count: 10, total_ns: 10 * 1000 };
    pace.moved_bytes = copied_bytes;
    let before = pace.bytes_per_s;
    pace.judge(Time::from_millis(1000));
    (before, pace.bytes_per_s)
}

#[test]
fn a_rate_that_clients_bear_is_raised_by_an_eighth_at_a_time_and_only_where_it_is_used() {
    let allowed = allowed_speed(LIMIT_PERCENT);
    let (before, after) = judged(SPEED_MAX, 64 << 20);
    assert_eq!(after, before + before / 8);
    let (before, after) = judged(allowed, 8 << 20);
    assert_eq!(after, before, "just what is allowed, and not used");
    let (before, after) = judged(allowed - 1, 64 << 20);
    assert!(after < before);
}

#[test]
fn a_rate_grows_by_an_eighth_for_each_judgement_at_most() {
    let (mut pace, mut now) = (Pace::new(), Time::from_millis(10));
    run(&FAST, &mut pace, &mut now, SECONDS, true, false);
    let (began, mut grown) = (now, 0);
    while now < began + Duration::from_secs(1) {
        now = now + Duration::from_micros(200);
        let before = pace.bytes_per_s;
        if pace.may_copy(now) {
            pace.copied(now, u64::from(pace.chunk_bytes()));
        }
        let arrived = now - Duration::from_micros(100);
        pace.answered(now, arrived.max(pace.since), Kind::Write, 4096);
        pace.step(now, Some(1), true, || true);
        if before != UNLIMITED && pace.bytes_per_s > before {
            grown += 1;
            assert!(pace.bytes_per_s <= before + before / 8, "{before} {}", pace.bytes_per_s);
        }
    }
    assert!(grown > 3, "{grown}");
}
