// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package hostdevice

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/invoke"
	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"
	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/cilium/networkdriver/internal/osthread"
	"github.com/cilium/networkdriver/internal/testenv"
	"github.com/cilium/networkdriver/pkg/nic"
	"github.com/cilium/networkdriver/pkg/nicowner"
)

// patience is how long something may take that takes a second at most on an idle machine.
const (
	patience     = 30 * time.Second
	pollInterval = 20 * time.Millisecond
)

// built is the directory that plugins has made.
var built string

// plugins builds the plugin and those that it is used with, and returns their directory.
var plugins = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "cni-bin-")
	if err != nil {
		return "", err
	}
	built = dir
	const module = "github.com/containernetworking/plugins/plugins/"
	for _, build := range []struct {
		in       string
		packages []string
	}{
		{"testdata/amd-host-device", []string{"."}},
		{"../../test/lab/components/cni", []string{module + "main/host-device", module + "ipam/static", module + "ipam/host-local", module + "meta/sbr"}},
	} {
		cmd := exec.Command("go", append([]string{"build", "-ldflags=-s -w", "-o", dir + "/"}, build.packages...)...)
		cmd.Dir = build.in
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			return dir, fmt.Errorf("build plugins: %w\n%s", err, out)
		}
	}
	return dir, nil
})

func TestMain(m *testing.M) {
	code := m.Run()
	if built != "" {
		_ = os.RemoveAll(built)
	}
	os.Exit(code)
}

// space is a network namespace of a test, with a handle of the library in it.
type space struct {
	*netlink.Handle
	t    testing.TB
	path string
}

func newSpace(t testing.TB) *space {
	t.Helper()
	s := &space{t: t, path: testenv.NetNS(t)}
	ns, err := netns.GetFromPath(s.path)
	require.NoError(t, err)
	defer ns.Close()
	s.Handle, err = netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
	require.NoError(t, err)
	t.Cleanup(s.die)
	s.do(func() error { return os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0o600) })
	s.up("lo")
	return s
}

// die lets go of the namespace, which ends it.
func (s *space) die() {
	if s.Handle != nil {
		s.Handle.Close()
		s.Handle = nil
	}
	if err := unix.Unmount(s.path, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) {
		s.t.Errorf("unmount %s: %v", s.path, err)
	}
}

// do runs a function in the namespace, with whatever it starts.
func (s *space) do(f func() error) {
	s.t.Helper()
	require.NoError(s.t, s.try(f))
}

func (s *space) try(f func() error) error {
	return osthread.Run(func() error {
		ns, err := netns.GetFromPath(s.path)
		if err == nil {
			err = errors.Join(netns.Set(ns), ns.Close())
		}
		if err == nil {
			err = f()
		}
		return err
	})
}

// link returns a link by name, nil if there is none.
func (s *space) link(name string) netlink.Link {
	s.t.Helper()
	link, err := s.LinkByName(name)
	if errors.As(err, &netlink.LinkNotFoundError{}) {
		return nil
	}
	require.NoError(s.t, err)
	return link
}

func (s *space) mustLink(name string) netlink.Link {
	s.t.Helper()
	link := s.link(name)
	require.NotNil(s.t, link, "link %s in %s", name, s.path)
	return link
}

func isUp(link netlink.Link) bool { return link.Attrs().RawFlags&unix.IFF_UP != 0 }

func (s *space) up(name string) {
	s.t.Helper()
	require.NoError(s.t, s.LinkSetUp(s.mustLink(name)))
}

// address adds addresses such as "10.1.2.5/31" and "10.1.2.5 peer 10.1.2.4/31".
func (s *space) address(name string, addrs ...string) {
	s.t.Helper()
	for _, a := range addrs {
		local, peer, pointToPoint := strings.Cut(a, " peer ")
		if pointToPoint {
			local += "/32"
		}
		addr, err := netlink.ParseAddr(local)
		require.NoError(s.t, err)
		if pointToPoint {
			addr.Peer, err = netlink.ParseIPNet(peer)
			require.NoError(s.t, err)
		}
		if addr.IP.To4() == nil {
			addr.Flags = unix.IFA_F_NODAD // usable at once
		}
		require.NoError(s.t, s.AddrAdd(s.mustLink(name), addr), a)
	}
}

// veth makes a pair of links, one of them in another namespace, both up.
func (s *space) veth(name string, other *space, peer string) {
	s.t.Helper()
	attrs := netlink.NewLinkAttrs()
	attrs.Name = name
	ns, err := netns.GetFromPath(other.path)
	require.NoError(s.t, err)
	defer ns.Close()
	require.NoError(s.t, s.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: peer, PeerNamespace: netlink.NsFd(ns)}))
	s.up(name)
	other.up(peer)
}

// routes returns the IPv4 routes of a table in the style of ip route, sorted.
func (s *space) routes(table int) []string {
	s.t.Helper()
	list, err := s.RouteListFiltered(netlink.FAMILY_V4, &netlink.Route{Table: table}, netlink.RT_FILTER_TABLE)
	require.NoError(s.t, err)
	names := map[int]string{}
	links, err := s.LinkList()
	require.NoError(s.t, err)
	for _, l := range links {
		names[l.Attrs().Index] = l.Attrs().Name
	}
	out := []string{}
	for _, r := range list {
		text := r.Dst.String()
		if r.Gw != nil {
			text += " via " + r.Gw.String()
		}
		out = append(out, text+" dev "+names[r.LinkIndex])
	}
	slices.Sort(out)
	return out
}

// rules returns the rules of a family that are not the kernel's own.
func (s *space) rules(family int) []string {
	s.t.Helper()
	list, err := s.RuleList(family)
	require.NoError(s.t, err)
	out := []string{}
	for _, r := range list {
		if r.Src != nil {
			out = append(out, fmt.Sprintf("from %s lookup %d", r.Src.IP, r.Table))
		}
	}
	slices.Sort(out)
	return out
}

// snapshot is everything about a namespace's links that is to be as before, in words.
func (s *space) snapshot() []string {
	s.t.Helper()
	place, err := nic.Open(slog.New(slog.DiscardHandler), s.path, "")
	require.NoError(s.t, err)
	defer place.Close()
	links, err := place.List()
	require.NoError(s.t, err)
	out := []string{}
	for _, l := range links {
		st, err := readState(place, l)
		require.NoError(s.t, err)
		slices.Sort(st.AltNames) // the kernel lists them as they were added
		// Addresses that the kernel makes by itself come a moment after a link is up.
		st.Addresses = slices.DeleteFunc(st.Addresses, func(a address) bool { return a.Local.Is6() && a.Local.IsLinkLocalUnicast() })
		text, err := json.Marshal(st)
		require.NoError(s.t, err)
		out = append(out, string(text))
	}
	slices.Sort(out)
	return out
}

// serve answers on an address: whatever is sent comes back.
func (s *space) serve(addr string) {
	s.t.Helper()
	var listener net.Listener
	s.do(func() (err error) {
		listener, err = net.Listen("tcp", net.JoinHostPort(addr, "7"))
		return err
	})
	s.t.Cleanup(func() { listener.Close() })
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				_, _ = io.Copy(conn, conn)
			}()
		}
	}()
}

// ping sends something from an address (any, if empty) to one that serves, and waits for it to come back.
func (s *space) ping(from, to string) error {
	return s.try(func() error {
		dialer := net.Dialer{Timeout: 5 * time.Second}
		if from != "" {
			dialer.LocalAddr = &net.TCPAddr{IP: net.ParseIP(from)}
		}
		conn, err := dialer.Dial("tcp", net.JoinHostPort(to, "7"))
		if err != nil {
			return err
		}
		defer conn.Close()
		if err := conn.SetDeadline(time.Now().Add(5 * time.Second)); err != nil {
			return err
		}
		if _, err := conn.Write([]byte("there")); err != nil {
			return err
		}
		back := make([]byte, 5)
		_, err = io.ReadFull(conn, back)
		if err == nil && string(back) != "there" {
			err = fmt.Errorf("%q came back", back)
		}
		return err
	})
}

// bed is a host with a NIC, eth1, whose other end is a port of a leaf switch, and a pod.
type bed struct {
	t               testing.TB
	host, leaf, pod *space
	bin             string // directory of the plugins
	stateDir        string
	cacheDir        string
	containerID     string
	ifName          string
}

const nicName, port = "eth1", "port"

func newBed(t testing.TB) *bed {
	t.Helper()
	testenv.Privileged(t)
	bin, err := plugins()
	require.NoError(t, err)
	b := &bed{
		t: t, host: newSpace(t), leaf: newSpace(t), pod: newSpace(t), bin: t.TempDir(),
		stateDir: filepath.Join(t.TempDir(), "state"), cacheDir: t.TempDir(), containerID: "c1", ifName: "net1",
	}
	built, err := os.ReadDir(bin)
	require.NoError(t, err)
	for _, plugin := range built {
		require.NoError(t, os.Symlink(filepath.Join(bin, plugin.Name()), filepath.Join(b.bin, plugin.Name())))
	}
	b.node()
	b.host.veth(nicName, b.leaf, port)
	return b
}

// node writes the node's file with the bed's state directory; fields come last.
func (b *bed) node(fields ...string) {
	b.t.Helper()
	content := fmt.Sprintf(`{"stateDir": %q%s}`, b.stateDir, join(fields))
	require.NoError(b.t, os.WriteFile(filepath.Join(b.bin, "node.json"), []byte(content), 0o600))
}

// in is the bed for a subtest.
func (b *bed) in(t *testing.T) *bed {
	sub, host := *b, *b.host
	host.t, sub.t, sub.host = t, t, &host
	return &sub
}

// plugin is the configuration of the plugin under test; fields come last.
func (b *bed) plugin(fields ...string) string {
	return fmt.Sprintf(`{"type": %q, "device": %q, "logLevel": "debug"%s}`, Name, nicName, join(fields))
}

func join(fields []string) string {
	var out strings.Builder
	for _, f := range fields {
		out.WriteString(", " + f)
	}
	return out.String()
}

const sbr = `{"type": "sbr"}`

// list is a network of plugins.
func (b *bed) list(version string, plugins ...string) *libcni.NetworkConfigList {
	b.t.Helper()
	list, err := libcni.NetworkConfFromBytes([]byte(fmt.Sprintf(`{"cniVersion": %q, "name": "fabric", "plugins": [%s]}`,
		version, strings.Join(plugins, ", "))))
	require.NoError(b.t, err)
	return list
}

// runtime is what calls the plugins, as a container runtime does.
func (b *bed) runtime() *libcni.CNIConfig {
	// Plugins' logs are seen where they are called without it.
	quiet := &invoke.DefaultExec{RawExec: &invoke.RawExec{Stderr: io.Discard}}
	return libcni.NewCNIConfigWithCacheDir([]string{b.bin}, b.cacheDir, quiet)
}

func (b *bed) conf() *libcni.RuntimeConf {
	return &libcni.RuntimeConf{ContainerID: b.containerID, NetNS: b.pod.path, IfName: b.ifName}
}

func (b *bed) tryAdd(list *libcni.NetworkConfigList) (result *current.Result, err error) {
	err = b.host.try(func() error {
		raw, err := b.runtime().AddNetworkList(b.t.Context(), list, b.conf())
		if err != nil {
			return err
		}
		if raw.Version() != list.CNIVersion {
			return fmt.Errorf("result of version %s, want %s", raw.Version(), list.CNIVersion)
		}
		result, err = current.NewResultFromResult(raw)
		return err
	})
	return result, err
}

func (b *bed) add(list *libcni.NetworkConfigList) *current.Result {
	b.t.Helper()
	result, err := b.tryAdd(list)
	require.NoError(b.t, err)
	return result
}

func (b *bed) tryDel(list *libcni.NetworkConfigList) error {
	return b.host.try(func() error { return b.runtime().DelNetworkList(context.Background(), list, b.conf()) })
}

func (b *bed) del(list *libcni.NetworkConfigList) {
	b.t.Helper()
	require.NoError(b.t, b.tryDel(list))
}

func (b *bed) check(list *libcni.NetworkConfigList) error {
	return b.host.try(func() error { return b.runtime().CheckNetworkList(b.t.Context(), list, b.conf()) })
}

// requireHome waits until the host is as before, and checks that nothing is recorded.
func (b *bed) requireHome(before []string) {
	b.t.Helper()
	require.Equal(b.t, before, b.host.snapshot())
	require.Empty(b.t, b.recorded())
	require.Empty(b.t, b.owned())
}

// owned are the keys of the NICs that the plugin has, by what other programs are told.
func (b *bed) owned() []string {
	b.t.Helper()
	keys, err := b.owners().Owned(Name)
	require.NoError(b.t, err)
	return keys
}

func (b *bed) owners() nicowner.Dir { return nicowner.Dir(filepath.Join(b.bin, "owners")) }

// recorded returns the names of the files in the directory of records.
func (b *bed) recorded() []string {
	b.t.Helper()
	entries, err := os.ReadDir(filepath.Join(b.stateDir, "attachments"))
	if !errors.Is(err, os.ErrNotExist) {
		require.NoError(b.t, err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// raw calls the plugin alone, as libcni does.
type rawCall struct {
	verb, containerID, ifName, netns string
	conf                             string
	path                             string // CNI_PATH, the bed's if empty
}

func (b *bed) command(c rawCall) *exec.Cmd {
	cmd := exec.Command(filepath.Join(b.bin, Name))
	if c.path == "" {
		c.path = b.bin
	}
	cmd.Env = []string{
		"PATH=" + os.Getenv("PATH"), "CNI_COMMAND=" + c.verb, "CNI_CONTAINERID=" + c.containerID, "CNI_NETNS=" + c.netns,
		"CNI_IFNAME=" + c.ifName, "CNI_PATH=" + c.path,
	}
	cmd.Stdin = strings.NewReader(c.conf)
	return cmd
}

// run calls the plugin and returns its output and error object.
func (b *bed) run(c rawCall) (stdout, stderr string, failure *types.Error) {
	b.t.Helper()
	var out, errs bytes.Buffer
	err := b.host.try(func() error {
		cmd := b.command(c)
		cmd.Stdout, cmd.Stderr = &out, &errs
		return cmd.Run()
	})
	if err != nil {
		failure = &types.Error{}
		require.NoError(b.t, json.Unmarshal(out.Bytes(), failure), "%v: %s%s", err, out.String(), errs.String())
		require.NotZero(b.t, failure.Code)
	}
	return out.String(), errs.String(), failure
}

// single is a configuration for the plugin alone.
func (b *bed) single(fields ...string) string {
	return strings.Replace(b.plugin(fields...), "{", `{"cniVersion": "1.1.0", "name": "fabric", `, 1)
}

func (b *bed) call(verb, conf string) rawCall {
	return rawCall{verb: verb, containerID: b.containerID, ifName: b.ifName, netns: b.pod.path, conf: conf}
}

// must calls the plugin, which must succeed, and returns what it logged.
func (b *bed) must(verb, conf string) string {
	b.t.Helper()
	_, stderr, failure := b.run(b.call(verb, conf))
	require.Nil(b.t, failure, "%s: %v\n%s", verb, failure, stderr)
	return stderr
}

func prefixes(result *current.Result) (out []string) {
	for _, ip := range result.IPs {
		p, _ := netip.AddrFromSlice(ip.Address.IP)
		ones, _ := ip.Address.Mask.Size()
		out = append(out, netip.PrefixFrom(p.Unmap(), ones).String())
	}
	return out
}
