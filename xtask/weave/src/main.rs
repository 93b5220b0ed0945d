//! Puts many broken variants of the code into one tree, each behind a switch.
//!
//! `quoin-weave LIST SOURCE TREE [N,N,…]` reads the output of `cargo mutants --list --json`, writes
//! the files of SOURCE to TREE with each change (but those whose numbers are given) behind
//! `woven::on(N)`, and prints a line `N REASON` for each that it leaves out. One build then serves
//! all of them: the variable `QUOIN_WOVEN` chooses the one that a process runs with, and a process
//! writes to the file `QUOIN_WOVEN_REACHED` which ones it reached. A build for each of two thousand
//! changes takes days; this takes the time of their tests.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use proc_macro2::{LineColumn, Span};
use syn::spanned::Spanned;
use syn::visit_mut::{self, VisitMut};
use syn::{Expr, parse_quote};

/// The module that is put into each crate that has a change.
const SWITCH: &str = r#"
/// Which broken variant this process runs, and which it came by.
pub mod woven {
    use std::sync::LazyLock;
    use std::sync::atomic::{AtomicU32, Ordering};

    static WHICH: LazyLock<u32> = LazyLock::new(|| {
        std::env::var("QUOIN_WOVEN").ok().and_then(|n| n.parse().ok()).unwrap_or(u32::MAX)
    });
    /// The file that takes the number of each variant that is come by, one a line.
    static REACHED: LazyLock<Option<std::ffi::OsString>> =
        LazyLock::new(|| std::env::var_os("QUOIN_WOVEN_REACHED"));
    /// A bit for each that was written there.
    static WRITTEN: [AtomicU32; 512] = [const { AtomicU32::new(0) }; 512];

    /// Returns true if it is this one.
    pub fn on(number: u32) -> bool {
        if let Some(file) = &*REACHED {
            let (word, bit) = (&WRITTEN[number as usize / 32], 1 << (number % 32));
            if word.load(Ordering::Relaxed) & bit == 0
                && word.fetch_or(bit, Ordering::Relaxed) & bit == 0
            {
                write(file, number);
            }
        }
        *WHICH == number
    }

    /// The file is not kept open: descriptors are counted and closed by what runs here.
    #[cold]
    fn write(file: &std::ffi::OsStr, number: u32) {
        use std::io::Write;
        if let Ok(mut file) = std::fs::File::options().create(true).append(true).open(file) {
            let _ = file.write_all(format!("{number}\n").as_bytes());
        }
    }
}
"#;

/// Returns the root file of the crate of a source file below `source`: the library's, or that of a
/// program without one.
fn crate_root(source: &Path, file: &str) -> Option<String> {
    let (home, _) = file.split_once("/src/")?;
    let roots = ["lib.rs", "main.rs"].map(|root| format!("{home}/src/{root}"));
    roots.into_iter().find(|root| source.join(root).exists())
}

struct Mutant {
    number: u32,
    genre: String,
    replacement: String,
}

/// Line from one, column from zero: as `syn` counts.
type Place = (usize, usize);

struct Weaver {
    switch: syn::Path,
    /// Several changes may have one place.
    wanted: BTreeMap<Place, Vec<Mutant>>,
    /// Number of changes within constants that the compiler evaluates, where no switch is possible.
    constant: usize,
    left_out: Vec<(u32, &'static str)>,
}

impl Weaver {
    fn take(&mut self, span: Span, genres: &[&str]) -> Vec<Mutant> {
        let LineColumn { line, column } = span.start();
        let Some(there) = self.wanted.get_mut(&(line, column)) else { return Vec::new() };
        let (mine, others) = there.drain(..).partition(|m| genres.contains(&m.genre.as_str()));
        *there = others;
        if self.constant == 0 {
            return mine;
        }
        self.left_out.extend(mine.iter().map(|m| (m.number, "evaluated by the compiler")));
        Vec::new()
    }

    fn leave_out(&mut self, mutants: &[Mutant], why: &'static str) {
        self.left_out.extend(mutants.iter().map(|m| (m.number, why)));
    }

    /// Returns an expression that is `changed` when the switch is on, else `expr`.
    fn switched(&self, number: u32, changed: Expr, expr: &Expr) -> Expr {
        let switch = &self.switch;
        parse_quote!((if #switch(#number) { #changed } else { #expr }))
    }

    fn block(&mut self, block: &mut syn::Block) {
        let Some(first) = block.stmts.first() else { return };
        let switch = self.switch.clone();
        for mutant in self.take(first.span(), &["FnValue"]) {
            let Ok(value) = syn::parse_str::<Expr>(&mutant.replacement) else {
                self.leave_out(&[mutant], "its value is no expression");
                continue;
            };
            let number = mutant.number;
            block.stmts.insert(0, parse_quote!(if #switch(#number) { return #value; }));
        }
    }

    fn constant(&mut self, inner: impl FnOnce(&mut Self)) {
        self.constant += 1;
        inner(self);
        self.constant -= 1;
    }
}

fn has_let(expr: &Expr) -> bool {
    match expr {
        Expr::Let(_) => true,
        Expr::Binary(both) => has_let(&both.left) || has_let(&both.right),
        _ => false,
    }
}

fn place(value: &serde_json::Value) -> Option<Place> {
    let number = |key: &str| usize::try_from(value[key].as_u64()?).ok();
    Some((number("line")?, number("column")?.checked_sub(1)?))
}

impl VisitMut for Weaver {
    fn visit_item_fn_mut(&mut self, item: &mut syn::ItemFn) {
        if item.sig.constness.is_some() {
            return self.constant(|w| {
                w.block(&mut item.block);
                visit_mut::visit_item_fn_mut(w, item);
            });
        }
        self.block(&mut item.block);
        visit_mut::visit_item_fn_mut(self, item);
    }

    fn visit_impl_item_fn_mut(&mut self, item: &mut syn::ImplItemFn) {
        if item.sig.constness.is_some() {
            return self.constant(|w| {
                w.block(&mut item.block);
                visit_mut::visit_impl_item_fn_mut(w, item);
            });
        }
        self.block(&mut item.block);
        visit_mut::visit_impl_item_fn_mut(self, item);
    }

    fn visit_trait_item_fn_mut(&mut self, item: &mut syn::TraitItemFn) {
        if let Some(block) = &mut item.default {
            self.block(block);
        }
        visit_mut::visit_trait_item_fn_mut(self, item);
    }

    fn visit_item_const_mut(&mut self, item: &mut syn::ItemConst) {
        self.constant(|w| visit_mut::visit_item_const_mut(w, item));
    }

    fn visit_impl_item_const_mut(&mut self, item: &mut syn::ImplItemConst) {
        self.constant(|w| visit_mut::visit_impl_item_const_mut(w, item));
    }

    fn visit_item_static_mut(&mut self, item: &mut syn::ItemStatic) {
        self.constant(|w| visit_mut::visit_item_static_mut(w, item));
    }

    fn visit_type_mut(&mut self, item: &mut syn::Type) {
        self.constant(|w| visit_mut::visit_type_mut(w, item));
    }

    fn visit_expr_repeat_mut(&mut self, repeat: &mut syn::ExprRepeat) {
        self.visit_expr_mut(&mut repeat.expr);
        self.constant(|w| w.visit_expr_mut(&mut repeat.len));
    }

    fn visit_expr_match_mut(&mut self, expr: &mut syn::ExprMatch) {
        let for_all = |arm: &syn::Arm| matches!(arm.pat, syn::Pat::Wild(_)) && arm.guard.is_none();
        if !expr.arms.iter().any(for_all) {
            // A compiler error would name the whole match, and so no switch.
            for arm in &expr.arms {
                let deleted = self.take(arm.pat.span(), &["MatchArm"]);
                self.leave_out(&deleted, "unviable: no arm is left for all else");
            }
        }
        visit_mut::visit_expr_match_mut(self, expr);
    }

    fn visit_arm_mut(&mut self, arm: &mut syn::Arm) {
        let start = arm.pat.span();
        let guard = arm.guard.as_ref().map(|(_, guard)| guard.span());
        let (deleted, guards) = (
            self.take(start, &["MatchArm"]),
            guard.map_or_else(Vec::new, |span| self.take(span, &["MatchArmGuard"])),
        );
        visit_mut::visit_arm_mut(self, arm);
        let switch = self.switch.clone();
        for mutant in guards {
            let number = mutant.number;
            let Some((_, guard)) = &mut arm.guard else { continue };
            if has_let(guard) {
                self.leave_out(&[mutant], "a guard with a pattern");
                continue;
            }
            **guard = match mutant.replacement.as_str() {
                "true" => parse_quote!(#switch(#number) || (#guard)),
                _ => parse_quote!(!#switch(#number) && (#guard)),
            };
        }
        for mutant in deleted {
            let number = mutant.number;
            let guard: Expr = match &arm.guard {
                Some((_, guard)) => parse_quote!(!#switch(#number) && (#guard)),
                None => parse_quote!(!#switch(#number)),
            };
            arm.guard = Some((Default::default(), Box::new(guard)));
        }
    }

    fn visit_expr_mut(&mut self, expr: &mut Expr) {
        let span = match expr {
            Expr::Binary(both) => Some(both.op.span()),
            Expr::Unary(one) => Some(one.op.span()),
            _ => None,
        };
        let mine =
            span.map_or_else(Vec::new, |s| self.take(s, &["BinaryOperator", "UnaryOperator"]));
        visit_mut::visit_expr_mut(self, expr);
        if mine.is_empty() {
            return;
        }
        if has_let(expr) {
            return self.leave_out(&mine, "unviable: a pattern under ||");
        }
        let whole = expr.clone();
        for mutant in mine {
            let changed: Option<Expr> = match &whole {
                Expr::Binary(both) => syn::parse_str(&mutant.replacement)
                    .ok()
                    .map(|op| Expr::Binary(syn::ExprBinary { op, ..both.clone() })),
                Expr::Unary(one) if mutant.replacement.is_empty() => Some((*one.expr).clone()),
                _ => None,
            };
            match changed {
                Some(changed) => *expr = self.switched(mutant.number, changed, expr),
                None => self.leave_out(&[mutant], "not understood"),
            }
        }
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [list, root, tree, rest @ ..] = arguments.as_slice() else {
        return Err("quoin-weave LIST SOURCE TREE [N,N,…]".into());
    };
    let without: BTreeSet<u32> =
        rest.iter().flat_map(|l| l.split(',')).filter_map(|n| n.parse().ok()).collect();
    let list: Vec<serde_json::Value> = serde_json::from_slice(&std::fs::read(list)?)?;
    let mut files: BTreeMap<String, BTreeMap<Place, Vec<Mutant>>> = BTreeMap::new();
    for (number, mutant) in (0_u32..).zip(&list) {
        let text = |key: &str| mutant[key].as_str().unwrap_or_default().to_owned();
        let Some(start) = place(&mutant["span"]["start"]) else {
            println!("{number} no place");
            continue;
        };
        let Some(of_crate) = crate_root(Path::new(root), &text("file")) else {
            println!("{number} in no crate's sources");
            continue;
        };
        files.entry(of_crate).or_default();
        let changes = files.entry(text("file")).or_default().entry(start).or_default();
        if !without.contains(&number) {
            let (genre, replacement) = (text("genre"), text("replacement"));
            changes.push(Mutant { number, genre, replacement });
        }
    }
    for (file, wanted) in files {
        let path = Path::new(root).join(&file);
        let mut source = syn::parse_file(&std::fs::read_to_string(&path)?)?;
        let switch = parse_quote!(crate::woven::on);
        let mut weaver = Weaver { switch, wanted, constant: 0, left_out: Vec::new() };
        weaver.visit_file_mut(&mut source);
        let lost = weaver.wanted.into_values().flatten().map(|m| (m.number, "not found"));
        for (number, why) in weaver.left_out.into_iter().chain(lost) {
            println!("{number} {why}");
        }
        let mut woven = prettyplease::unparse(&source);
        if crate_root(Path::new(root), &file).as_ref() == Some(&file) {
            woven.push_str(SWITCH);
        }
        let path = Path::new(tree).join(&file);
        // An unchanged file keeps its time, and is not built again.
        if std::fs::read_to_string(&path).is_ok_and(|old| old == woven) {
            continue;
        }
        std::fs::write(path, woven)?;
    }
    Ok(())
}
