#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    (quoin_fuzz::target("export").expect("a target of this name").run)(input);
});
