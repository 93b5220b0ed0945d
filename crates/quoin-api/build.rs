//! Compiles the `.proto` files with a pure-Rust compiler: the user's machine needs no protoc.
//!
//! Messages that carry secrets get a `Debug` that shows their name only, so that no log line, error
//! or assertion prints one by accident.

use std::fmt::Write as _;
use std::path::Path;

use tonic_prost_build::{Builder, FileDescriptorSet};

/// Fields whose content may be sensitive in every message.
const SENSITIVE_FIELDS: [&str; 4] = ["secrets", "mount_flags", "wrapped", "encryption_key"];

/// Directory of CSI-Addons below that of the sources, and of what is made of it.
const ADDONS: &str = "csi-addons";

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto");
    let out = std::path::PathBuf::from(std::env::var("OUT_DIR")?);
    generate(protox::compile(sources("proto")?, ["proto"])?, &out, |builder| builder)?;

    // They use messages of the first ones, which are not made anew.
    let addons = protox::compile(sources(&format!("proto/{ADDONS}"))?, ["proto"])?;
    let out = out.join(ADDONS);
    std::fs::create_dir_all(&out)?;
    generate(addons, &out, |builder| builder.extern_path(".csi.v1", "crate::csi"))?;

    // A client's part alone.
    let directory = std::path::PathBuf::from(std::env::var("OUT_DIR")?);
    let etcd = protox::compile(sources("proto/etcd")?, ["proto"])?;
    generate(etcd, &directory, |builder| builder.build_server(false))
}

fn sources(directory: &str) -> std::io::Result<Vec<std::path::PathBuf>> {
    let mut files: Vec<_> = std::fs::read_dir(directory)?
        .filter_map(|entry| entry.ok().map(|e| e.path()))
        .filter(|path| path.extension().is_some_and(|e| e == "proto"))
        .collect();
    files.sort();
    Ok(files)
}

/// Generates messages, services and the `Debug` of secret messages, a file of each for each package.
fn generate(
    descriptors: FileDescriptorSet,
    directory: &Path,
    configured: impl FnOnce(Builder) -> Builder,
) -> Result<(), Box<dyn std::error::Error>> {
    let mut silent = Vec::new();
    for file in &descriptors.file {
        let package = file.package();
        let mut implementations = String::new();
        for message in &file.message_type {
            if message.field.iter().any(|field| SENSITIVE_FIELDS.contains(&field.name())) {
                silent.push(format!(".{package}.{}", message.name()));
                write_debug(&mut implementations, message.name(), message.name())?;
            }
            for nested in &message.nested_type {
                if nested.field.iter().any(|field| SENSITIVE_FIELDS.contains(&field.name())) {
                    silent.push(format!(".{package}.{}.{}", message.name(), nested.name()));
                    let path = format!("{}::{}", snake_case(message.name()), nested.name());
                    write_debug(&mut implementations, &path, nested.name())?;
                }
            }
        }
        std::fs::write(directory.join(format!("{package}.redacted.rs")), implementations)?;
    }
    let builder = tonic_prost_build::configure()
        .build_client(true)
        .build_server(true)
        .skip_debug(silent)
        .out_dir(directory);
    configured(builder).compile_fds(descriptors)?;
    Ok(())
}

/// Writes a `Debug` that names the message and shows none of its content.
fn write_debug(out: &mut String, path: &str, name: &str) -> std::fmt::Result {
    writeln!(
        out,
        "impl ::core::fmt::Debug for {path} {{
    fn fmt(&self, f: &mut ::core::fmt::Formatter<'_>) -> ::core::fmt::Result {{
        f.debug_struct({name:?}).finish_non_exhaustive()
    }}
}}"
    )
}

/// Returns the module name that nested messages are generated into.
fn snake_case(name: &str) -> String {
    let mut out = String::new();
    for (index, letter) in name.chars().enumerate() {
        if letter.is_uppercase() && index > 0 {
            out.push('_');
        }
        out.extend(letter.to_lowercase());
    }
    out
}
