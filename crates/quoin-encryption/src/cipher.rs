//! AES-256-XTS over the blocks of a volume (IEEE 1619; the cipher itself is AWS-LC's).
//!
//! The data unit is a block of 4 KiB and its tweak is the block's number, so a block's ciphertext
//! depends on its place and never on the time of its write: what a volume goes back to decrypts as
//! before. A block of zeroes in the store is a hole and stays one: nothing is decrypted there. (No
//! block is encrypted to zeroes but with a chance of 2⁻³²⁷⁶⁸.)

use std::ptr::{NonNull, null, null_mut};

use aws_lc_sys::{
    EVP_CIPHER_CTX, EVP_CIPHER_CTX_free, EVP_CIPHER_CTX_new, EVP_Cipher, EVP_CipherInit_ex,
    EVP_aes_256_xts,
};
use bytes::{Bytes, BytesMut};

use crate::{DataKey, Error};

const BLOCK: usize = 4096;
static HOLE: [u8; BLOCK] = [0; BLOCK];

/// One direction of the cipher, with the key's schedule.
struct Xts(NonNull<EVP_CIPHER_CTX>);

// SAFETY: the context is owned by this value alone, AWS-LC keeps no reference to it, and every use
// needs `&mut`.
unsafe impl Send for Xts {}

impl Drop for Xts {
    fn drop(&mut self) {
        // SAFETY: the context was made by `EVP_CIPHER_CTX_new` and is freed once. AWS-LC overwrites
        // what it frees.
        unsafe { EVP_CIPHER_CTX_free(self.0.as_ptr()) }
    }
}

impl Xts {
    fn new(key: &[u8; 64], encrypts: bool) -> Result<Self, Error> {
        aws_lc_sys::init();
        // SAFETY: no arguments; a null result is handled.
        let context = NonNull::new(unsafe { EVP_CIPHER_CTX_new() });
        let context = Self(context.ok_or(Error::System("memory for a cipher"))?);
        // SAFETY: the context is valid, the key has the 64 bytes that AES-256-XTS reads, and a null
        // tweak is allowed here.
        let done = unsafe {
            EVP_CipherInit_ex(
                context.0.as_ptr(),
                EVP_aes_256_xts(),
                null_mut(),
                key.as_ptr(),
                null(),
                i32::from(encrypts),
            )
        };
        if done == 1 { Ok(context) } else { Err(Error::System("a cipher with this key")) }
    }

    /// Processes one data unit of at least 16 bytes.
    fn unit(&mut self, tweak: u128, input: &[u8], output: &mut [u8]) {
        assert!(input.len() == output.len() && input.len() >= 16, "a data unit");
        let tweak = tweak.to_le_bytes();
        // SAFETY: the context has its cipher and key; the tweak has the 16 bytes that are read; and
        // both slices have the length that is passed.
        let done = unsafe {
            EVP_CipherInit_ex(self.0.as_ptr(), null(), null_mut(), null(), tweak.as_ptr(), -1) == 1
                && EVP_Cipher(self.0.as_ptr(), output.as_mut_ptr(), input.as_ptr(), input.len())
                    == 1
        };
        // AWS-LC fails only without a key or a tweak, or for a unit of another length.
        assert!(done, "AES-XTS of a data unit");
    }
}

/// The cipher of one volume's blocks.
pub struct VolumeCipher {
    encrypt: Xts,
    decrypt: Xts,
}

impl VolumeCipher {
    /// # Errors
    /// If the system has no memory for it.
    pub fn new(key: &DataKey) -> Result<Self, Error> {
        let bytes = key.bytes().try_into().map_err(|_| Error::Form("a data key has 64 bytes"))?;
        Ok(Self { encrypt: Xts::new(bytes, true)?, decrypt: Xts::new(bytes, false)? })
    }

    /// Encrypts whole blocks; `None`: the range is none of whole blocks.
    pub fn encrypt(&mut self, offset: u64, clear: &[u8]) -> Option<Bytes> {
        if !offset.is_multiple_of(BLOCK as u64) || !clear.len().is_multiple_of(BLOCK) {
            return None;
        }
        let mut sealed = vec![0; clear.len()];
        let blocks = clear.chunks_exact(BLOCK).zip(sealed.chunks_exact_mut(BLOCK));
        for (lba, (clear, sealed)) in (offset / BLOCK as u64..).zip(blocks) {
            self.encrypt.unit(lba.into(), clear, sealed);
        }
        Some(sealed.into())
    }

    /// Decrypts what was read from `offset` on, whole blocks in chunks; holes stay zeroes.
    pub fn decrypt(&mut self, offset: u64, mut chunks: Vec<Bytes>) -> Vec<Bytes> {
        if chunks.iter().any(|chunk| !chunk.len().is_multiple_of(BLOCK)) {
            let mut whole = BytesMut::with_capacity(chunks.iter().map(Bytes::len).sum());
            chunks.iter().for_each(|chunk| whole.extend_from_slice(chunk));
            chunks = vec![whole.freeze()];
        }
        let mut lba = offset / BLOCK as u64;
        for chunk in &mut chunks {
            let first = lba;
            lba += (chunk.len() / BLOCK) as u64;
            if chunk.chunks_exact(BLOCK).all(|block| block == HOLE) {
                continue;
            }
            let mut clear = vec![0; chunk.len()];
            let blocks = chunk.chunks_exact(BLOCK).zip(clear.chunks_exact_mut(BLOCK));
            for (lba, (sealed, clear)) in (first..).zip(blocks) {
                if sealed != HOLE {
                    self.decrypt.unit(lba.into(), sealed, clear);
                }
            }
            *chunk = clear.into();
        }
        chunks
    }
}

#[cfg(test)]
mod tests {
    use aws_lc_sys::{AES_KEY, AES_decrypt, AES_encrypt, AES_set_decrypt_key, AES_set_encrypt_key};
    use proptest::prelude::*;
    use zeroize::Zeroizing;

    use super::*;

    fn key(seed: u8) -> DataKey {
        let bytes = (0..64).map(|at: u8| at.wrapping_mul(37).wrapping_add(seed)).collect();
        DataKey::of_bytes(Zeroizing::new(bytes)).unwrap()
    }

    fn bytes(text: &str) -> Vec<u8> {
        hex::decode(text.replace([' ', '\n'], "")).unwrap()
    }

    /// AES-256 of one block of 16 bytes.
    fn aes(key: &[u8], block: [u8; 16], encrypts: bool) -> [u8; 16] {
        let mut out = [0; 16];
        // SAFETY: the schedule is written before it is read, and all lengths are those of AES-256.
        unsafe {
            let mut schedule: AES_KEY = std::mem::zeroed();
            if encrypts {
                assert_eq!(AES_set_encrypt_key(key.as_ptr(), 256, &mut schedule), 0);
                AES_encrypt(block.as_ptr(), out.as_mut_ptr(), &schedule);
            } else {
                assert_eq!(AES_set_decrypt_key(key.as_ptr(), 256, &mut schedule), 0);
                AES_decrypt(block.as_ptr(), out.as_mut_ptr(), &schedule);
            }
        }
        out
    }

    /// XTS as IEEE 1619 writes it (5.3.2), one block of 16 bytes after the other.
    fn reference(key: &[u8], tweak: u128, input: &[u8], encrypts: bool) -> Vec<u8> {
        let mut mask = u128::from_le_bytes(aes(&key[32..], tweak.to_le_bytes(), true));
        let mut out = Vec::new();
        for block in input.chunks_exact(16) {
            let block = u128::from_le_bytes(block.try_into().unwrap()) ^ mask;
            let block = aes(&key[..32], block.to_le_bytes(), encrypts);
            out.extend((u128::from_le_bytes(block) ^ mask).to_le_bytes());
            // Multiplication by x in GF(2¹²⁸).
            mask = (mask << 1) ^ ((mask >> 127) * 0x87);
        }
        out
    }

    #[test]
    fn vector_10_of_ieee_1619_encrypts_and_decrypts_as_the_standard_says() {
        let key: [u8; 64] = bytes(
            "2718281828459045235360287471352662497757247093699959574966967627
             3141592653589793238462643383279502884197169399375105820974944592",
        )
        .try_into()
        .unwrap();
        let clear: Vec<u8> = (0..512).map(|at| at as u8).collect();
        let sealed = bytes(
            "1c3b3a102f770386e4836c99e370cf9bea00803f5e482357a4ae12d414a3e63b
             5d31e276f8fe4a8d66b317f9ac683f44680a86ac35adfc3345befecb4bb188fd
             5776926c49a3095eb108fd1098baec70aaa66999a72a82f27d848b21d4a741b0
             c5cd4d5fff9dac89aeba122961d03a757123e9870f8acf1000020887891429ca
             2a3e7a7d7df7b10355165c8b9a6d0a7de8b062c4500dc4cd120c0f7418dae3d0
             b5781c34803fa75421c790dfe1de1834f280d7667b327f6c8cd7557e12ac3a0f
             93ec05c52e0493ef31a12d3d9260f79a289d6a379bc70c50841473d1a8cc81ec
             583e9645e07b8d9670655ba5bbcfecc6dc3966380ad8fecb17b6ba02469a020a
             84e18e8f84252070c13e9f1f289be54fbc481457778f616015e1327a02b140f1
             505eb309326d68378f8374595c849d84f4c333ec4423885143cb47bd71c5edae
             9be69a2ffeceb1bec9de244fbe15992b11b77c040f12bd8f6a975a44a0f90c29
             a9abc3d4d893927284c58754cce294529f8614dcd2aba991925fedc4ae74ffac
             6e333b93eb4aff0479da9a410e4450e0dd7ae4c6e2910900575da401fc07059f
             645e8b7e9bfdef33943054ff84011493c27b3429eaedb4ed5376441a77ed4385
             1ad77f16f541dfd269d50d6a5f14fb0aab1cbb4c1550be97f7ab4066193c4caa
             773dad38014bd2092fa755c824bb5e54c4f36ffda9fcea70b9c6e693e148c151",
        );
        assert_eq!(reference(&key, 0xff, &clear, true), sealed);
        let mut out = vec![0; 512];
        Xts::new(&key, true).unwrap().unit(0xff, &clear, &mut out);
        assert_eq!(out, sealed);
        Xts::new(&key, false).unwrap().unit(0xff, &sealed, &mut out);
        assert_eq!(out, clear);
    }

    #[test]
    fn a_key_with_equal_halves_is_no_key_of_the_cipher() {
        assert!(Xts::new(&[7; 64], true).is_err());
    }

    #[test]
    fn the_same_block_differs_at_another_place_and_under_another_key_and_not_at_another_time() {
        let (mut one, mut other) =
            (VolumeCipher::new(&key(1)).unwrap(), VolumeCipher::new(&key(2)).unwrap());
        let clear = [9; 4096];
        let here = one.encrypt(4096, &clear).unwrap();
        assert_eq!(one.encrypt(4096, &clear).unwrap(), here);
        assert_ne!(one.encrypt(8192, &clear).unwrap(), here);
        assert_ne!(other.encrypt(4096, &clear).unwrap(), here);
    }

    #[test]
    fn zeroes_that_are_written_are_encrypted_and_holes_are_not_decrypted() {
        let mut cipher = VolumeCipher::new(&key(1)).unwrap();
        let zeroes = cipher.encrypt(0, &HOLE).unwrap();
        assert_ne!(zeroes, HOLE[..]);
        let read = cipher.decrypt(0, vec![zeroes, Bytes::from_static(&HOLE)]);
        assert_eq!(read.concat(), [0; 8192]);
    }

    #[test]
    fn parts_of_blocks_are_not_encrypted() {
        let mut cipher = VolumeCipher::new(&key(1)).unwrap();
        assert_eq!(cipher.encrypt(512, &[1; 4096]), None);
        assert_eq!(cipher.encrypt(0, &[1; 512]), None);
        assert_eq!(cipher.encrypt(0, &[]), Some(Bytes::new()));
    }

    proptest! {
        #[test]
        fn the_cipher_is_that_of_the_reference_at_every_place(
            seed: u8,
            lba in 0..1u64 << 40,
            blocks in 1..4usize,
            fill: [u8; 32],
            cut in 0..4096usize,
        ) {
            let key = key(seed);
            let mut cipher = VolumeCipher::new(&key).unwrap();
            let clear: Vec<u8> = fill.iter().copied().cycle().take(blocks * BLOCK).collect();
            let sealed = cipher.encrypt(lba * BLOCK as u64, &clear).unwrap();
            let units = (lba..).zip(clear.chunks_exact(BLOCK));
            let expected: Vec<u8> =
                units.flat_map(|(lba, unit)| reference(key.bytes(), lba.into(), unit, true)).collect();
            prop_assert_eq!(&sealed[..], &expected[..]);
            // However the read is cut into chunks.
            let chunks = vec![sealed.slice(..cut), sealed.slice(cut..)];
            let read = cipher.decrypt(lba * BLOCK as u64, chunks).concat();
            prop_assert_eq!(read, clear);
        }
    }
}
