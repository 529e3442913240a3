// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package lab

import (
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/cilium/networkdriver/test/lab/internal/cache"
	"github.com/cilium/networkdriver/test/lab/internal/cpio"
	"github.com/cilium/networkdriver/test/lab/internal/debian"
	"github.com/cilium/networkdriver/test/lab/internal/guest"
	"github.com/cilium/networkdriver/test/lab/internal/kmod"
)

// NodeArtifacts is what emulated nodes are made of.
type NodeArtifacts struct {
	Kernel string // path of the kernel image
	Initrd string // path of the initial RAM disk
	Disk   string // path of the image of a new node's disk
	QEMU   string // root directory of QEMU and its libraries
	Cache  string // directory of the cache

	Containerd string // version
}

// nodePackages are the Debian packages in a node's root file system: what
// kubelet, containerd and the CNI plugins call, and what people and tests use.
var nodePackages = []string{
	"bash", "ca-certificates", "coreutils", "dash", "ethtool", "findutils", "grep", "gzip", "hostname",
	"iproute2", "iptables", "iputils-arping", "iputils-ping", "jq", "kmod", "less", "libc-bin", "mawk", "mount",
	"pciutils", "procps", "runc", "sed", "tar", "tcpdump", "util-linux",
}

// nodeModules are the kernel modules that a node loads at boot. Others that
// are in its file system are loaded on demand.
var nodeModules = []string{
	"9p", "9pnet_virtio", "dummy", "igb", "igbvf", "nf_tables", "overlay", "veth", "vfio-pci", "virtio_net", "virtio_rng",
}

// extraModules are for iptables and for tests.
var extraModules = []string{
	"8021q", "af_packet_diag", "bonding", "bridge", "br_netfilter", "ipvlan", "macvlan", "tun", "vrf", "vxlan", "nft_compat", "nft_chain_nat", "nft_ct", "nft_masq", "nft_nat", "nft_reject_inet", "nf_nat",
	"nf_conntrack", "xt_addrtype", "xt_comment", "xt_conntrack", "xt_mark", "xt_MASQUERADE", "xt_nat", "xt_tcpudp", "xt_multiport",
	"iptable_nat", "iptable_filter", "team", "ifb", "sch_ingress", "cls_bpf", "act_mirred", "vfio_iommu_type1", "xfrm_user", "nlmon",
	"crc32_generic", "ib_umad", "rdma_rxe", "rdma_ucm",
}

// bootModules are what the initial RAM disk needs to find the disk.
var bootModules = []string{"virtio_pci", "virtio_blk", "ext4", "crc32c_generic"}

// Layouts of what is made: raised when the code that makes it changes.
const (
	packagesLayout = "1"
	diskLayout     = "2"
)

func (b *builder) nodeArtifacts(ctx context.Context) (*NodeArtifacts, error) {
	if os.Geteuid() != 0 {
		return nil, errors.New("emulated nodes need root: for network namespaces, and to unpack packages")
	}
	archive, err := debian.Open(filepath.Join(b.cache.Dir, "apt"))
	if err != nil {
		return nil, err
	}
	packages := &packages{builder: b, archive: archive}
	qemu, err := packages.tree(ctx, "qemu", archive.Newer, "qemu-system-x86", "busybox-static")
	if err != nil {
		return nil, err
	}
	kernel, err := packages.kernel(ctx)
	if err != nil {
		return nil, err
	}
	base, err := packages.tree(ctx, "base", archive.Release, nodePackages...)
	if err != nil {
		return nil, err
	}
	busybox := filepath.Join(qemu, "usr", "bin", "busybox")
	vmlinuz, err := filepath.Glob(filepath.Join(kernel, "boot", "vmlinuz-*"))
	if err != nil || len(vmlinuz) != 1 {
		return nil, fmt.Errorf("the kernel package has no kernel: %v %v", vmlinuz, err)
	}
	initrd, err := b.initrd(ctx, kernel, busybox)
	if err != nil {
		return nil, err
	}
	disk, err := b.disk(ctx, base, kernel, busybox)
	if err != nil {
		return nil, err
	}
	return &NodeArtifacts{Kernel: vmlinuz[0], Initrd: initrd, Disk: disk, QEMU: qemu, Cache: b.cache.Dir, Containerd: b.opts.Containerd}, nil
}

// packages fetches packages of one archive.
type packages struct {
	*builder
	archive *debian.Archive
	updated bool
}

// tree unpacks packages and all they need.
func (p *packages) tree(ctx context.Context, name, suite string, names ...string) (string, error) {
	return p.fetch(ctx, name, append([]string{suite}, names...), func() ([]string, error) {
		return p.archive.Closure(ctx, suite, names...)
	})
}

// kernel unpacks the kernel package, without what it would want installed.
func (p *packages) kernel(ctx context.Context) (string, error) {
	const meta = "linux-image-amd64"
	return p.fetch(ctx, "kernel", []string{p.archive.Newer, meta}, func() ([]string, error) {
		name, err := p.archive.Dependency(ctx, p.archive.Newer, meta)
		return []string{name}, err
	})
}

// fetch unpacks the packages that resolve names. Their versions are those of
// the mirror at the first build, and are kept in the file "packages".
func (p *packages) fetch(ctx context.Context, name string, inputs []string, resolve func() ([]string, error)) (string, error) {
	a := cache.Artifact{Name: name, Inputs: append([]string{packagesLayout, p.archive.Release}, inputs...)}
	return p.cache.Ensure(ctx, a, func(ctx context.Context, dir string) error {
		// Lists of an earlier build may name versions that the mirror has no longer.
		if !p.updated {
			p.progress.step("fetching package lists of Debian %s", p.archive.Release)
			if err := p.archive.Update(ctx); err != nil {
				return err
			}
			p.updated = true
		}
		list, err := resolve()
		if err != nil {
			return err
		}
		p.progress.step("fetching %d packages for %s", len(list), name)
		if err := p.archive.Fetch(ctx, dir, list...); err != nil {
			return err
		}
		if err := debian.Unpack(ctx, dir, dir); err != nil {
			return err
		}
		return os.WriteFile(filepath.Join(dir, "packages"), []byte(strings.Join(list, "\n")+"\n"), 0o644)
	})
}

func modulesDir(kernel string) (string, error) {
	dirs, err := filepath.Glob(filepath.Join(kernel, "usr", "lib", "modules", "*"))
	if err != nil || len(dirs) != 1 {
		return "", fmt.Errorf("the kernel package has no modules: %v %v", dirs, err)
	}
	return dirs[0], nil
}

// initrd packs the node's first program and the modules that it needs to find
// the disk.
func (b *builder) initrd(ctx context.Context, kernel, busybox string) (string, error) {
	// Go's own cache knows whether the program changed; the artifact's key is
	// its content.
	program := filepath.Join(b.cache.Dir, "lab-node")
	if err := run(ctx, b.root, goEnv, "go", "build", "-trimpath", "-ldflags", "-s -w", "-o", program, "./test/lab/cmd/lab-node"); err != nil {
		return "", err
	}
	init, err := os.ReadFile(program)
	if err != nil {
		return "", err
	}
	a := cache.Artifact{Name: "initrd", Inputs: []string{string(init), kernel, strings.Join(bootModules, " ")}}
	dir, err := b.cache.Ensure(ctx, a, func(ctx context.Context, dir string) error {
		b.progress.step("packing the initial RAM disk")
		modDir, err := modulesDir(kernel)
		if err != nil {
			return err
		}
		tree, err := kmod.Open(modDir, busybox)
		if err != nil {
			return err
		}
		modules, err := tree.Closure(ctx, bootModules...)
		if err != nil {
			return err
		}
		f, err := os.Create(filepath.Join(dir, "initrd.gz"))
		if err != nil {
			return err
		}
		defer f.Close()
		zip, err := gzip.NewWriterLevel(f, gzip.BestSpeed)
		if err != nil {
			return err
		}
		w := cpio.NewWriter(zip)
		for _, d := range []string{"proc", "sys", "dev", "root", "modules"} {
			w.Dir(d)
		}
		w.File("init", init)
		for i, m := range modules {
			w.File(fmt.Sprintf("modules/%03d-%s.ko", i, m.Name), m.Data)
		}
		return errors.Join(w.Close(), zip.Close(), f.Close())
	})
	return filepath.Join(dir, "initrd.gz"), err
}

// disk makes the image of a new node's disk: its root file system with
// everything that runs on it.
func (b *builder) disk(ctx context.Context, base, kernel, busybox string) (string, error) {
	programs := map[string]string{}
	for _, c := range []component{b.kube(), b.containerd(), cniComponent} {
		dir, err := b.build(ctx, c)
		if err != nil {
			return "", err
		}
		programs[c.name] = dir
	}
	a := cache.Artifact{Name: "disk", Inputs: []string{
		diskLayout, base, kernel, programs["kube"], programs["containerd"], programs["cni"],
		strings.Join(nodeModules, " "), strings.Join(extraModules, " "),
	}}
	dir, err := b.cache.Ensure(ctx, a, func(ctx context.Context, dir string) error {
		b.progress.step("making the nodes' disk image")
		root := filepath.Join(dir, "root")
		defer os.RemoveAll(root)
		if err := run(ctx, dir, nil, "cp", "--archive", base, root); err != nil {
			return err
		}
		for _, part := range []func() error{
			func() error { return trim(root) },
			func() error { return addPrograms(ctx, root, programs) },
			func() error { return addModules(ctx, root, kernel, busybox) },
			func() error { return addImages(root, busybox) },
			func() error { return addSettings(root) },
		} {
			if err := part(); err != nil {
				return err
			}
		}
		// Sparse: it takes the space of its files. Inode tables need no zeroing
		// in a new file.
		image := filepath.Join(dir, "disk.img")
		return run(ctx, dir, nil, "/sbin/mke2fs", "-q", "-t", "ext4", "-E", "lazy_itable_init=1,root_owner=0:0", "-d", root, image, "6G")
	})
	return filepath.Join(dir, "disk.img"), err
}

// trim removes what no node reads.
func trim(root string) error {
	for _, d := range []string{"doc", "man", "locale", "info", "lintian", "perl", "perl5", "zoneinfo", "bash-completion", "i18n"} {
		if err := os.RemoveAll(filepath.Join(root, "usr", "share", d)); err != nil {
			return err
		}
	}
	return nil
}

func addPrograms(ctx context.Context, root string, programs map[string]string) error {
	for from, to := range map[string]string{
		filepath.Join(programs["kube"], "kubelet"): "usr/local/bin",
		programs["containerd"] + "/.":              "usr/local/bin",
		programs["cni"] + "/.":                     "opt/cni/bin",
	} {
		to := filepath.Join(root, to)
		if err := os.MkdirAll(to, 0o755); err != nil {
			return err
		}
		if err := run(ctx, root, nil, "cp", "--archive", from, to); err != nil {
			return err
		}
	}
	return nil
}

// addModules copies modules, decompressed, and indexes them by the node's own
// depmod.
func addModules(ctx context.Context, root, kernel, busybox string) error {
	from, err := modulesDir(kernel)
	if err != nil {
		return err
	}
	tree, err := kmod.Open(from, busybox)
	if err != nil {
		return err
	}
	modules, err := tree.Closure(ctx, append(append([]string{}, nodeModules...), extraModules...)...)
	if err != nil {
		return err
	}
	version := filepath.Base(from)
	to := filepath.Join(root, "usr", "lib", "modules", version)
	for _, m := range modules {
		rel, err := filepath.Rel(from, m.Path)
		if err != nil {
			return err
		}
		path := filepath.Join(to, rel)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(path, m.Data, 0o644); err != nil {
			return err
		}
	}
	for _, index := range []string{"modules.builtin", "modules.builtin.modinfo", "modules.order"} {
		data, err := os.ReadFile(filepath.Join(from, index))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(to, index), data, 0o644); err != nil {
			return err
		}
	}
	return run(ctx, root, nil, "chroot", root, "/sbin/depmod", version)
}

// addSettings writes the files that the packages' install scripts would have
// written, and the lab's own.
func addSettings(root string) error {
	files := map[string]string{
		guest.ModulesFile:          strings.Join(nodeModules, "\n") + "\n",
		"/etc/modprobe.d/lab.conf": "# No links but those that are asked for.\noptions dummy numdummies=0\noptions bonding max_bonds=0\n",
		"/etc/passwd":              "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/nonexistent:/bin/false\n",
		"/etc/group":               "root:x:0:\nnogroup:x:65534:\n",
		"/etc/hosts":               "127.0.0.1 localhost\n",
		"/etc/resolv.conf":         "",
	}
	for path, content := range files {
		path = filepath.Join(root, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
			return err
		}
	}
	// A package has /var/run as a directory, which on a real system would be a link by now.
	if err := os.RemoveAll(filepath.Join(root, "var/run")); err != nil {
		return err
	}
	links := map[string]string{
		"usr/sbin/iptables": "xtables-nft-multi", "usr/sbin/iptables-save": "xtables-nft-multi",
		"usr/sbin/ip6tables": "xtables-nft-multi", "usr/sbin/iptables-restore": "xtables-nft-multi",
		"usr/bin/sh": "dash", "usr/bin/awk": "mawk", "var/run": "/run",
	}
	for link, target := range links {
		if err := os.Symlink(target, filepath.Join(root, link)); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
	}
	for _, d := range []string{"proc", "sys", "dev", "run", "tmp", "root", "mnt", "share", "lab", "var/lib", "var/log", "etc/cni/net.d", "etc/cdi"} {
		if err := os.MkdirAll(filepath.Join(root, d), 0o755); err != nil {
			return err
		}
	}
	return nil
}
