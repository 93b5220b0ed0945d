//! The floor alone, without Quoin: `cargo run --release -p quoin-bench --example floor`.

use clap::Parser;

#[derive(Parser)]
enum Arguments {
    #[command(subcommand, hide = true)]
    BenchPart(quoin_bench::Part),
    Run(Box<quoin_bench::Options>),
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    match Arguments::parse() {
        Arguments::BenchPart(part) => quoin_bench::run_part(&part)?,
        Arguments::Run(mut options) => {
            options.subject.floor_only = options.subject.nbd_socket.is_none();
            quoin_bench::run(&options, &std::env::current_exe()?)?;
        }
    }
    Ok(())
}
