use quoin_model::mirror::*;
fn main() {
    let max: usize = std::env::args().nth(2).and_then(|n| n.parse().ok()).unwrap_or(5_000_000);
    let what = std::env::args().nth(1).unwrap_or_default();
    let prog = std::env::args().nth(3).is_none();
    for b in WORLDS { if b.name == what || what=="all" {
        let t = std::time::Instant::now();
        let f = search(*b, None, max, prog);
        println!("{}: {} states settled {} complete {} {:?} {:.1}s", b.name, f.states, f.settled, f.complete, f.violation, t.elapsed().as_secs_f64());
    }}
    for m in Broken::ALL { if m.name() == what || what=="mutants" {
      let mut any = false;
      for b in WORLDS {
        let f = search(*b, Some(*m), max, false);
        if let Some((i, t)) = f.violation { println!("{}: {} {i} after {} states", m.name(), b.name, f.states); any = true; if what != "mutants" { for s in t { println!("   {s}"); } } break; }
      }
      if !any { println!("{}: NOTHING", m.name()); }
    }}
}
