// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package dra

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cilium/statedb"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	kubetypes "k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/cilium/networkdriver/internal/testenv"
	"github.com/cilium/networkdriver/pkg/networkdriver/claims"
	"github.com/cilium/networkdriver/pkg/networkdriver/inventory"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	testDriver = "networkdriver.cilium.io"
	testNode   = "worker-node-1"
	// patience is how long a test waits for what has to happen.
	patience = 30 * time.Second
)

// newClient returns a client whose apiserver holds objects, names slices and counts versions.
func newClient() *fake.Clientset {
	client := fake.NewClientset(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: testNode, UID: "node-uid"}})
	var version atomic.Int64
	stamp := func(action clienttesting.Action) (bool, runtime.Object, error) {
		slice := action.(clienttesting.CreateAction).GetObject().(*resourceapi.ResourceSlice)
		n := strconv.FormatInt(version.Add(1), 10)
		if slice.Name == "" {
			slice.Name, slice.UID = slice.GenerateName+n, kubetypes.UID(n)
		}
		slice.ResourceVersion = n
		return false, nil, nil
	}
	client.PrependReactor("create", "resourceslices", stamp)
	client.PrependReactor("update", "resourceslices", stamp)
	return client
}

// fakeClaims answers for claims. Functions that are not set succeed.
type fakeClaims struct {
	await      func(context.Context, *resourceapi.ResourceClaim)
	prepare    func(context.Context, *resourceapi.ResourceClaim) (claims.Result, error)
	unprepare  func(context.Context, kubetypes.UID) error
	redescribe func(kubetypes.UID) error
	answered   func([]kubetypes.UID)
}

func (f fakeClaims) AwaitDevices(ctx context.Context, claim *resourceapi.ResourceClaim) {
	if f.await != nil {
		f.await(ctx, claim)
	}
}

func (f fakeClaims) Prepare(ctx context.Context, claim *resourceapi.ResourceClaim) (claims.Result, error) {
	if f.prepare == nil {
		return claims.Result{}, nil
	}
	return f.prepare(ctx, claim)
}

func (f fakeClaims) Unprepare(ctx context.Context, claim kubetypes.UID) error {
	if f.unprepare == nil {
		return nil
	}
	return f.unprepare(ctx, claim)
}

func (f fakeClaims) Redescribe(_ context.Context, claim kubetypes.UID) error {
	if f.redescribe == nil {
		return nil
	}
	return f.redescribe(claim)
}

func (f fakeClaims) Unprepared(claims []kubetypes.UID) {
	if f.answered != nil {
		f.answered(claims)
	}
}

// noMetadata has pods read nothing.
type noMetadata struct{}

func (noMetadata) Options() []kubeletplugin.Option                { return nil }
func (noMetadata) Complete(kubetypes.UID, []kubeletplugin.Device) {}
func (noMetadata) Check(tables.ClaimRef, []string) error          { return nil }

// fakeRuntime is a container runtime that is connected unless it is away.
type fakeRuntime struct{ away string }

func (r fakeRuntime) WaitConnected(ctx context.Context) error {
	if r.away == "" {
		return nil
	}
	<-ctx.Done()
	return fmt.Errorf("%s: %w", r.away, ctx.Err())
}

// fixture is a driver with its tables, a kubelet directory and an apiserver.
type fixture struct {
	*Driver
	t           testing.TB
	log         *testenv.LogBuffer
	client      *fake.Clientset
	db          *statedb.DB
	inventory   *inventory.Inventory
	allocations statedb.RWTable[*tables.DRAAllocation]
	faults      statedb.RWTable[*tables.DeviceHealth]

	cancel context.CancelFunc
	done   chan error
}

func newFixture(t testing.TB, claims Claims, change func(*Config)) *fixture {
	// Not t.TempDir: a socket's path must be short.
	root, err := os.MkdirTemp("", "dra")
	require.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(root) })

	f := &fixture{t: t, log: &testenv.LogBuffer{}, client: newClient(), db: statedb.New(), done: make(chan error, 1)}
	devices, err := tables.NewDeviceTable(f.db)
	require.NoError(t, err)
	f.allocations, err = tables.NewAllocationTable(f.db)
	require.NoError(t, err)
	f.faults, err = tables.NewHealthTable(f.db)
	require.NoError(t, err)
	reports, err := inventory.NewReportTable(f.db)
	require.NoError(t, err)
	log := slog.New(slog.NewTextHandler(f.log, nil))
	f.inventory = inventory.New(log, f.db, devices, reports, f.allocations)
	f.inventory.Expect()

	config := Config{
		DriverName: testDriver, NodeName: testNode, KubeletRootDir: root,
		RetryInterval: 10 * time.Millisecond, Timeout: patience, MaxAttempts: 3,
	}
	if change != nil {
		change(&config)
	}
	f.Driver = New(Params{
		Logger: log, Config: config, Client: f.client, Prompt: f.client, Claims: claims, Metadata: noMetadata{}, Runtime: fakeRuntime{},
		DB: f.db, Devices: devices, Allocations: f.allocations, Faults: f.faults, Metrics: NewMetrics(),
	})
	return f
}

// start runs the driver; it is stopped at the end of the test.
func (f *fixture) start() {
	ctx, cancel := context.WithCancel(context.Background())
	f.cancel = cancel
	go func() { f.done <- f.Run(ctx) }()
	f.t.Cleanup(func() { _ = f.stop() })
}

func (f *fixture) stop() error {
	f.cancel()
	select {
	case err := <-f.done:
		f.done <- err
		return err
	case <-time.After(patience):
		f.t.Error("the driver does not stop")
		return nil
	}
}

// waitState waits for a state with the property and returns it.
func (f *fixture) waitState(what string, is func(State) bool) State {
	f.t.Helper()
	timeout := time.After(patience)
	for {
		state, changed := f.State()
		if is(state) {
			return state
		}
		select {
		case <-changed:
		case <-timeout:
			f.t.Fatalf("waited for: %s; state is %+v; log:\n%s", what, state, f.log)
		}
	}
}

// kubelet registers the driver by its socket once that is there and is not the file old, and returns the socket.
func (f *fixture) kubelet(old os.FileInfo, status *registerapi.RegistrationStatus) os.FileInfo {
	f.t.Helper()
	path, _ := f.config.socketPaths()
	var socket os.FileInfo
	require.Eventually(f.t, func() bool {
		now, err := os.Lstat(path)
		if err != nil || (old != nil && os.SameFile(old, now) && old.ModTime().Equal(now.ModTime())) {
			return false
		}
		if err := register(path, status); err != nil {
			f.t.Logf("register: %v", err)
			return false
		}
		socket = now
		return true
	}, patience, 5*time.Millisecond)
	return socket
}

// register does what kubelet does with a registration socket.
func register(path string, status *registerapi.RegistrationStatus) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	conn, err := dial(path)
	if err != nil {
		return err
	}
	defer conn.Close()
	client := registerapi.NewRegistrationClient(conn)
	info, err := client.GetInfo(ctx, &registerapi.InfoRequest{})
	if err != nil {
		return err
	}
	if info.Type != registerapi.DRAPlugin || info.Name != testDriver {
		return fmt.Errorf("unexpected plugin info %v", info)
	}
	if _, err := client.NotifyRegistrationStatus(ctx, status); err != nil && status.PluginRegistered {
		return err
	}
	return nil
}

func dial(path string) (*grpc.ClientConn, error) {
	return grpc.NewClient("unix://"+path, grpc.WithTransportCredentials(insecure.NewCredentials()))
}
